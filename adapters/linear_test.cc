// Held against the format, its bound and LibTorch's own operators.
#include "adapters/linear.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/utils.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <vector>

#include "base/testing/status_matchers.h"
#include "base/torch_status.h"
#include "fsdp/testing/memory_meter.h"

namespace fsdp::adapters {
namespace {

using ::fsdp::testing::MemoryMeter;
using ::fsdp::testing::StatusIs;

at::Tensor Random(int64_t rows, int64_t numel,
                  c10::ScalarType dtype = at::kFloat) {
  at::manual_seed(3);
  return at::randn({rows, numel}).mul_(0.02).to(dtype);
}

// The format of files: checkpoints have it.
TEST(Int8RowsTest, ARowIsNumbersPaddingAndScales) {
  const Int8Rows layout{5, 2};
  EXPECT_EQ(layout.row_bytes(), 5 + 3 + 3 * 4);
  const at::Tensor packed =
      Pack(layout, at::arange(-5, 5, at::kFloat).view({2, 5}));
  ASSERT_EQ(packed.scalar_type(), at::kByte);
  ASSERT_EQ(packed.sizes(), (std::vector<int64_t>{2, 20}));
  const auto* const bytes =
      reinterpret_cast<const int8_t*>(packed.const_data_ptr<uint8_t>()) + 20;
  // 0, 1 | 2, 3 | 4.
  const std::vector<int8_t> expected = {0, 127, 85, 127, 127, 0, 0, 0};
  EXPECT_EQ(std::vector<int8_t>(bytes, bytes + 8), expected);
  const std::vector<float> scales = {1.0f / 127, 3.0f / 127, 4.0f / 127};
  EXPECT_EQ(std::memcmp(bytes + 8, scales.data(), 12), 0);
}

// Two layouts of one row length would read each other's bytes.
TEST(Int8RowsTest, RowsOfOneLengthHaveOneLayout) {
  for (const int64_t numel : {1, 7, 64, 96, 97}) {
    std::map<int64_t, int64_t> block_of;  // by the length
    for (int64_t most = 1; most <= numel + 3; ++most) {
      const Int8Rows layout = Int8Rows::Of(numel, most);
      EXPECT_LE(layout.block, most);
      EXPECT_EQ((numel + layout.block - 1) / layout.block,
                (numel + most - 1) / most);
      const auto [it, is_new] =
          block_of.try_emplace(layout.row_bytes(), layout.block);
      EXPECT_EQ(it->second, layout.block) << numel << ", " << most;
    }
  }
  EXPECT_EQ(Int8Rows::Of(96, 64).block, 48);
  EXPECT_EQ(Int8Rows::Of(128, 64).block, 64);
}

TEST(Int8RowsTest, AnyFloatingPointIsPackedAndRoundsOnce) {
  const Int8Rows layout{20, 8};
  for (const c10::ScalarType dtype :
       {at::kDouble, at::kHalf, at::kBFloat16, at::kFloat8_e4m3fn}) {
    const at::Tensor rows = Random(3, 20, dtype);
    EXPECT_TRUE(
        at::equal(Pack(layout, rows), Pack(layout, rows.to(at::kFloat))))
        << dtype;
  }
  const at::Tensor packed = Pack(layout, Random(3, 20));
  EXPECT_TRUE(at::equal(Unpack(layout, packed, at::kBFloat16),
                        Unpack(layout, packed, at::kFloat).to(at::kBFloat16)));
  const at::Tensor strided = Random(20, 3).t();
  EXPECT_TRUE(
      at::equal(Pack(layout, strided), Pack(layout, strided.contiguous())));
}

TEST(Int8RowsTest, ZerosStayZeroAndWhatIsNotFiniteIsSeen) {
  const Int8Rows layout{6, 4};
  EXPECT_TRUE(
      at::equal(Unpack(layout, Pack(layout, at::zeros({2, 6})), at::kFloat),
                at::zeros({2, 6})));
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(),
                           std::numeric_limits<double>::infinity()}) {
    at::Tensor rows = at::full({2, 6}, 0.5);
    rows[1][5] = bad;
    const at::Tensor scales = ScalesOf(layout, Pack(layout, rows));
    EXPECT_EQ(scales.isnan().sum().item<int64_t>(), 1);
    EXPECT_TRUE(std::isnan(scales[1][1].item<float>()));
  }
}

constexpr int64_t kIn = 37, kOut = 11;
constexpr Int8Rows kLayout{kIn, 16};

class AutocastToBFloat16 {
 public:
  AutocastToBFloat16() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  }
  ~AutocastToBFloat16() {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
};

struct Computed {
  at::Tensor y, x_grad, bias_grad;
};

// Computes `linear` of a random x and bias, and backward.
template <typename Linear>
Computed Compute(std::vector<int64_t> batch, c10::ScalarType dtype,
                 bool has_bias, const Linear& linear) {
  at::manual_seed(4);
  batch.push_back(kIn);
  const at::Tensor x = at::randn(batch, dtype).requires_grad_();
  at::Tensor bias;
  if (has_bias) bias = at::randn({kOut}, dtype).requires_grad_();
  const at::Tensor y = linear(x, bias);
  y.backward(at::randn(y.sizes(), dtype));
  return {y.detach(), x.grad(), has_bias ? bias.grad() : at::Tensor()};
}

TEST(Int8LinearTest, ComputesWhatLinearDoesWithTheSameNumbers) {
  at::manual_seed(1);
  const at::Tensor packed = Pack(kLayout, at::randn({kOut, kIn}));
  for (const auto& batch :
       std::vector<std::vector<int64_t>>{{}, {1}, {5}, {2, 3}, {2, 1, 4}}) {
    for (const c10::ScalarType dtype :
         {at::kFloat, at::kDouble, at::kBFloat16}) {
      for (const bool has_bias : {false, true}) {
        const at::Tensor numbers = Unpack(kLayout, packed, dtype);
        const Computed expected =
            Compute(batch, dtype, has_bias,
                    [&](const at::Tensor& x, const at::Tensor& bias) {
                      return at::linear(x, numbers, bias);
                    });
        const Computed actual =
            Compute(batch, dtype, has_bias,
                    [&](const at::Tensor& x, const at::Tensor& bias) {
                      return Int8Linear(kLayout, x, packed, bias);
                    });
        EXPECT_TRUE(at::equal(actual.y, expected.y));
        EXPECT_EQ(actual.x_grad.scalar_type(), dtype);
        EXPECT_TRUE(at::allclose(actual.x_grad, expected.x_grad, 1e-6, 1e-6));
        if (!has_bias) continue;
        EXPECT_TRUE(
            at::allclose(actual.bias_grad, expected.bias_grad, 1e-2, 1e-6));
      }
    }
  }
}

TEST(Int8LinearTest, AutocastChoosesTheDtype) {
  const at::Tensor packed = Pack(kLayout, at::randn({kOut, kIn}));
  const at::Tensor x = at::randn({3, kIn}).requires_grad_();
  at::Tensor y;
  {
    const AutocastToBFloat16 autocast;
    y = Int8Linear(kLayout, x, packed, {});
  }
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  y.sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
  EXPECT_TRUE(at::allclose(x.grad(), Unpack(kLayout, packed, at::kFloat).sum(0),
                           1e-2, 5e-2));
}

// Neither numbers nor inputs are kept from forward to backward.
TEST(Int8LinearTest, HoldsOneMatrixWhileItComputes) {
  constexpr int64_t kWide = 512;
  const Int8Rows layout{kWide, 64};
  const at::Tensor packed = Pack(layout, at::randn({kWide, kWide}));
  const at::Tensor x = at::randn({1, kWide}).requires_grad_();
  constexpr int64_t kMatrix = kWide * kWide * 4;
  constexpr int64_t kVectors = 16 * kWide * 4;
  const auto meter = std::make_shared<MemoryMeter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  at::Tensor y = Int8Linear(layout, x, packed, {});
  EXPECT_GE(meter->peak(), kMatrix);
  EXPECT_LE(meter->TakePeak(), kMatrix + kVectors);
  EXPECT_LE(meter->live(), kVectors);
  y.sum().backward();
  EXPECT_LE(meter->peak(), kMatrix + kVectors);
}

TEST(Int8LinearTest, AGradientOfTheGradientIsThere) {
  at::manual_seed(2);
  const at::Tensor packed = Pack(kLayout, at::randn({kOut, kIn}));
  const at::Tensor numbers = Unpack(kLayout, packed, at::kDouble);
  std::vector<at::Tensor> results;
  for (const bool is_int8 : {false, true}) {
    at::manual_seed(5);
    const at::Tensor x = at::randn({3, kIn}, at::kDouble).requires_grad_();
    const at::Tensor y =
        is_int8 ? Int8Linear(kLayout, x, packed, {}) : at::linear(x, numbers);
    y.square().sum().backward({}, /*retain_graph=*/true,
                              /*create_graph=*/true);
    const at::Tensor first = x.grad();
    x.mutable_grad().reset();
    first.square().sum().backward();
    results.push_back(x.grad());
  }
  EXPECT_TRUE(at::allclose(results[1], results[0], 1e-10, 1e-10));
}

TEST(Int8LinearTest, NothingIsRecordedForAFrozenInput) {
  const at::Tensor packed = Pack(kLayout, at::randn({kOut, kIn}));
  EXPECT_FALSE(
      Int8Linear(kLayout, at::randn({2, kIn}), packed, {}).requires_grad());
  const c10::NoGradGuard no_grad;
  EXPECT_FALSE(
      Int8Linear(kLayout, at::randn({2, kIn}).requires_grad_(), packed, {})
          .requires_grad());
}

TEST(Int8LinearTest, AWeightThatWasConvertedIsRefused) {
  const at::Tensor packed = Pack(kLayout, at::randn({kOut, kIn}));
  for (const at::Tensor& weight :
       {packed.to(at::kFloat), packed.slice(1, 0, kIn), packed.flatten()}) {
    EXPECT_THAT(
        TorchToStatus("forward",
                      [&] {
                        Int8Linear(kLayout, at::randn({2, kIn}), weight, {});
                      }),
        StatusIs(absl::StatusCode::kFailedPrecondition,
                 ::testing::HasSubstr("before QuantizeBase()")));
  }
}

// 1 + 2^-8 is 1 in bfloat16, and 1 + 2^-8 + 2^-8 is not.
TEST(LinearTest, AddsTheBiasBeforeItRounds) {
  const c10::NoGradGuard no_grad;
  Linear linear(2, 1);
  linear->to(at::kBFloat16);
  linear->weight.fill_(1);
  linear->weight[0][1].fill_(1.0 / 256);
  linear->bias.fill_(1.0 / 256);
  for (const auto& sizes : {std::vector<int64_t>{2}, {3, 2}, {2, 3, 2}}) {
    const at::Tensor y =
        linear->forward(at::ones(sizes, linear->weight.options()));
    EXPECT_EQ(y.dim(), static_cast<int64_t>(sizes.size()));
    EXPECT_TRUE(y.eq(1 + 1.0 / 128).all().item<bool>()) << y;
  }
}

// In bfloat16 the product would be 2^-8, and 1 + 2^-8, in the middle of two
// values, the even one: 1.
TEST(LinearTest, AProductIsRoundedOnceWhenItIsAdded) {
  const at::Tensor weight = at::ones({1, 1}, at::kBFloat16);
  const at::Tensor factor = at::ones({1, 1});
  AddProduct(weight, factor, factor * (1.0 / 256 + 1.0 / 131072), /*scale=*/1);
  EXPECT_EQ(weight.item<float>(), 1 + 1.0f / 128);
}

// As if the second factor had learned something.
void FillFactors(Linear& layer) {
  const c10::NoGradGuard no_grad;
  for (const auto& item : layer->named_parameters()) {
    if (item.key() == "lora_A.weight" || item.key() == "lora_B.weight") {
      item.value().normal_(0, 0.3);
    }
  }
}

TEST(LinearTest, FactorsAreFloatUnlessAskedOtherwise) {
  const at::NoGradGuard no_grad;
  Linear layer(5, 7);
  layer->to(at::kBFloat16);
  layer->AddLowRank({});
  EXPECT_EQ(layer->named_parameters()["lora_A.weight"].scalar_type(),
            at::kFloat);
  EXPECT_EQ(layer(at::randn({3, 5}, at::kBFloat16)).scalar_type(),
            at::kBFloat16);
}

// The first factor is that of PyTorch's Linear: uniform in +-1 / sqrt(in).
TEST(LinearTest, FirstFactorsAreRandomSecondOnesZero) {
  torch::manual_seed(1);
  Linear layer(400, 3);
  LowRankOptions options;
  options.rank = 50;
  layer->AddLowRank(options);
  const auto parameters = layer->named_parameters();
  const at::Tensor a = parameters["lora_A.weight"].detach();
  EXPECT_LE(a.abs().max().item<float>(), 0.05f);
  EXPECT_NEAR(a.mean().item<float>(), 0, 1e-3);
  EXPECT_NEAR(a.std().item<float>(), 0.05 / std::sqrt(3), 1e-3);
  EXPECT_EQ(parameters["lora_B.weight"].abs().max().item<float>(), 0);
}

TEST(LinearTest, DropsInputsOfTheAdapterInTraining) {
  const at::NoGradGuard no_grad;
  Linear layer(64, 3);
  LowRankOptions options;
  options.dropout = 0.5;
  layer->AddLowRank(options);
  FillFactors(layer);
  const at::Tensor x = at::randn({4, 64});
  EXPECT_FALSE(at::equal(layer(x), layer(x)));
  layer->eval();
  EXPECT_TRUE(at::equal(layer(x), layer(x)));
}

}  // namespace
}  // namespace fsdp::adapters
