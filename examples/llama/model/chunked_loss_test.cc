#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>

#include "base/testing/status_matchers.h"
#include "base/torch_status.h"
#include "examples/llama/model/llama.h"
#include "fsdp/testing/memory_meter.h"

namespace llama {
namespace {

using ::fsdp::TorchToStatus;
using ::fsdp::testing::MemoryMeter;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

constexpr int64_t kTokens = 23, kDim = 5, kVocab = 17;

struct Inputs {
  at::Tensor hidden;
  at::Tensor weight;
  at::Tensor targets;
};

Inputs MakeInputs(c10::ScalarType dtype, int64_t tokens = kTokens,
                  int64_t dim = kDim, int64_t vocab = kVocab) {
  at::manual_seed(2);
  Inputs inputs;
  inputs.hidden = at::randn({tokens, dim}, dtype).set_requires_grad(true);
  inputs.weight = at::randn({vocab, dim}, dtype).set_requires_grad(true);
  inputs.targets = at::randint(vocab, {tokens}, at::kLong);
  return inputs;
}

at::Tensor Plain(const Inputs& inputs) {
  return at::cross_entropy_loss(at::linear(inputs.hidden, inputs.weight),
                                inputs.targets, /*weight=*/{},
                                at::Reduction::Mean, kIgnoredTarget);
}

at::Tensor Chunked(const Inputs& inputs, int64_t chunk_rows) {
  return ChunkedCrossEntropy(inputs.hidden, inputs.weight, inputs.targets,
                             chunk_rows);
}

TEST(ChunkedLossTest, LossAndGradientsAreThoseOfCrossEntropy) {
  for (const c10::ScalarType dtype : {at::kDouble, at::kFloat}) {
    const double tolerance = dtype == at::kDouble ? 1e-12 : 2e-6;
    for (const int64_t rows : {1, 7, 22, 23, 24, 1000}) {
      const Inputs plain = MakeInputs(dtype), chunked = MakeInputs(dtype);
      for (const Inputs* inputs : {&plain, &chunked}) {
        inputs->targets.slice(0, 5, 9).fill_(kIgnoredTarget);
        inputs->targets[22] = kIgnoredTarget;
      }
      const at::Tensor expected = Plain(plain);
      const at::Tensor loss = Chunked(chunked, rows);
      EXPECT_EQ(loss.scalar_type(), dtype);
      EXPECT_EQ(loss.dim(), 0);
      EXPECT_NEAR(loss.item<double>(), expected.item<double>(), tolerance);
      (3 * expected).backward();
      (3 * loss).backward();
      EXPECT_TRUE(chunked.hidden.grad().allclose(plain.hidden.grad(), tolerance,
                                                 tolerance))
          << rows;
      EXPECT_TRUE(chunked.weight.grad().allclose(plain.weight.grad(), tolerance,
                                                 tolerance))
          << rows;
    }
  }
}

TEST(ChunkedLossTest, WithoutATargetTheLossIsNanAndGradientsAreZero) {
  const Inputs plain = MakeInputs(at::kFloat), chunked = MakeInputs(at::kFloat);
  plain.targets.fill_(kIgnoredTarget);
  chunked.targets.fill_(kIgnoredTarget);
  const at::Tensor expected = Plain(plain), loss = Chunked(chunked, 4);
  EXPECT_TRUE(std::isnan(expected.item<double>()));
  EXPECT_TRUE(std::isnan(loss.item<double>()));
  expected.backward();
  loss.backward();
  EXPECT_TRUE(chunked.hidden.grad().equal(plain.hidden.grad()));
  EXPECT_TRUE(chunked.weight.grad().equal(plain.weight.grad()));
  EXPECT_EQ(chunked.weight.grad().abs().max().item<double>(), 0);
}

TEST(ChunkedLossTest, OnlyWhatRequiresAGradientGetsOne) {
  const Inputs plain = MakeInputs(at::kDouble);
  Plain(plain).backward();
  Inputs frozen_weight = MakeInputs(at::kDouble);
  frozen_weight.weight.set_requires_grad(false);
  Chunked(frozen_weight, 5).backward();
  EXPECT_FALSE(frozen_weight.weight.grad().defined());
  EXPECT_TRUE(frozen_weight.hidden.grad().allclose(plain.hidden.grad()));
  Inputs frozen_hidden = MakeInputs(at::kDouble);
  frozen_hidden.hidden.set_requires_grad(false);
  Chunked(frozen_hidden, 5).backward();
  EXPECT_FALSE(frozen_hidden.hidden.grad().defined());
  EXPECT_TRUE(frozen_hidden.weight.grad().allclose(plain.weight.grad()));
  frozen_hidden.weight.set_requires_grad(false);
  EXPECT_FALSE(Chunked(frozen_hidden, 5).requires_grad());
}

// In a sharded model it is a view of the unit's memory, which is another one by
// the time of backward.
TEST(ChunkedLossTest, TheWeightMayBeAViewThatIsGoneInBackward) {
  const Inputs plain = MakeInputs(at::kDouble);
  Plain(plain).backward();
  Inputs inputs = MakeInputs(at::kDouble);
  const at::Tensor flat = at::zeros({3 + kVocab * kDim}, at::kDouble);
  flat.slice(0, 3).copy_(inputs.weight.detach().view(-1));
  flat.set_requires_grad(true);
  inputs.weight = flat.slice(0, 3).view({kVocab, kDim});
  const at::Tensor loss = Chunked(inputs, 5);
  {
    const c10::NoGradGuard no_grad;
    flat.fill_(std::numeric_limits<double>::quiet_NaN());
  }
  loss.backward();
  EXPECT_TRUE(flat.grad()
                  .slice(0, 3)
                  .view({kVocab, kDim})
                  .allclose(plain.weight.grad()));
  EXPECT_TRUE(inputs.hidden.grad().allclose(plain.hidden.grad()));
}

TEST(ChunkedLossTest, BackwardMayRunTwiceButNotBeRecorded) {
  const Inputs plain = MakeInputs(at::kDouble),
               inputs = MakeInputs(at::kDouble);
  (2 * Plain(plain)).backward();
  const at::Tensor loss = Chunked(inputs, 5);
  loss.backward({}, /*retain_graph=*/true);
  loss.backward();
  EXPECT_TRUE(inputs.weight.grad().allclose(plain.weight.grad()));
  const at::Tensor recorded = Chunked(inputs, 5);
  EXPECT_THAT(TorchToStatus("backward",
                            [&recorded] {
                              recorded.backward({}, /*retain_graph=*/true,
                                                /*create_graph=*/true);
                            }),
              StatusIs(absl::StatusCode::kUnimplemented,
                       HasSubstr("no gradient of its gradient")));
}

// The sums are over 1024 chunks: in bfloat16, which has 8 bits, they would stay
// at 256 times what a chunk adds.
TEST(ChunkedLossTest, Bfloat16IsSummedInFloat32) {
  const Inputs exact{at::ones({1024, 1}), at::zeros({2, 1}),
                     at::zeros({1024}, at::kLong)};
  Inputs inputs = exact;
  inputs.hidden = exact.hidden.to(at::kBFloat16).set_requires_grad(true);
  inputs.weight = exact.weight.to(at::kBFloat16).set_requires_grad(true);
  const at::Tensor loss = Chunked(inputs, 1);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_NEAR(loss.item<double>(), std::log(2), 1e-5);
  loss.backward();
  EXPECT_EQ(inputs.weight.grad().scalar_type(), at::kBFloat16);
  EXPECT_EQ(inputs.weight.grad()[0].item<double>(), -0.5);
  EXPECT_EQ(inputs.weight.grad()[1].item<double>(), 0.5);
}

int64_t PeakOf(const std::function<void()>& fn) {
  const auto meter = std::make_shared<MemoryMeter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  fn();
  return meter->peak();
}

TEST(ChunkedLossTest, MemoryIsThatOfAChunkOfLogits) {
  constexpr int64_t kMany = 2048, kNarrow = 4, kWide = 1000, kRows = 64;
  constexpr int64_t kChunk = kRows * kWide * 4;  // bytes
  constexpr int64_t kGradients = (kMany + kWide) * kNarrow * 4;
  constexpr int64_t kRest = kMany * 24;  // targets and the like
  // LibTorch's kernels for bfloat16 copy the weight, with rows of at least 64.
  constexpr int64_t kCopied = 140 * kWide;
  Inputs inputs = MakeInputs(at::kFloat, kMany, kNarrow, kWide);
  at::Tensor loss;
  const auto forward = [&] { loss = Chunked(inputs, kRows); };
  EXPECT_LT(PeakOf(forward), kChunk + kGradients + kRest);
  EXPECT_LT(PeakOf([&loss] { loss.backward(); }), 2 * kGradients);
  EXPECT_GT(PeakOf([&] { loss = Plain(inputs); }), kMany * kWide * 4);
  inputs = MakeInputs(at::kBFloat16, kMany, kNarrow, kWide);
  EXPECT_LT(PeakOf(forward), kChunk * 3 / 2 + kGradients + kRest + kCopied);
  const c10::NoGradGuard no_grad;
  EXPECT_LT(PeakOf(forward), kChunk * 3 / 2 + kRest);
}

TEST(ChunkedLossTest, RefusesTargetsOutsideOfTheVocabulary) {
  for (const int64_t target : {kVocab, int64_t{-1}}) {
    const Inputs bad = MakeInputs(at::kFloat);
    bad.targets[3] = target;
    EXPECT_FALSE(TorchToStatus("loss", [&] { Chunked(bad, 4); }).ok())
        << target;
  }
}

}  // namespace
}  // namespace llama
