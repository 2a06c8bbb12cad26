#include "fsdp/optim/shard_gradients.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/check_that.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/optim/grad_clip.h"
#include "fsdp/testing/check_tensor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ranges/tensor_range.h"

namespace fsdp {
namespace {

using ::fsdp::testing::CheckTensor;
using ::fsdp::testing::CheckThat;
using ::testing::ElementsAre;

// Returns a shard with this gradient, which may be undefined.
TensorRange ShardWith(const at::Tensor& gradient, int replicas = 1) {
  const int64_t numel = gradient.defined() ? gradient.numel() : 4;
  TensorRange named{"p", {numel}, {1}, 0, at::zeros({numel})};
  named.replicas = replicas;
  if (gradient.defined()) named.values = at::zeros_like(gradient);
  named.values.set_requires_grad(true);
  named.values.mutable_grad() = gradient;
  return named;
}

std::vector<int64_t> Sizes(const GradientGroup& group) {
  std::vector<int64_t> sizes;
  sizes.reserve(group.gradients.size());
  for (const at::Tensor& gradient : group.gradients) {
    sizes.push_back(gradient.numel());
  }
  return sizes;
}

TEST(GroupGradientsTest, NeighboursInMemoryAreOne) {
  const at::Tensor flat = at::arange(100, at::kFloat);
  const auto part = [&](int64_t begin, int64_t numel) {
    return ShardWith(flat.narrow(0, begin, numel));
  };
  // The shards: without a gradient, empty, behind a gap, before the previous
  // one, and in other memory.
  const std::vector<TensorRange> shards = {
      part(0, 8),    part(8, 4),
      ShardWith({}), part(12, 4),
      part(16, 0),   part(16, 2),
      part(20, 4),   part(24, 6),
      part(10, 2),   ShardWith(at::ones({3})),
      part(12, 1)};
  const std::vector<GradientGroup> groups = GroupGradients(shards);
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_THAT(Sizes(groups[0]), ElementsAre(18, 10, 2, 3, 1));
  EXPECT_EQ(groups[0].each.size(), 9u);
  EXPECT_TRUE(groups[0].gradients[0].equal(flat.narrow(0, 0, 18)));
  EXPECT_TRUE(groups[0].gradients[1].equal(flat.narrow(0, 20, 10)));
}

TEST(GroupGradientsTest, OnlyContiguousOnesOfOneKindAreMerged) {
  const at::Tensor flat = at::arange(64, at::kFloat);
  const at::Tensor other = at::arange(64, at::kDouble);
  const std::vector<TensorRange> shards = {
      ShardWith(flat.narrow(0, 0, 4)), ShardWith(other.narrow(0, 0, 4)),
      ShardWith(flat.narrow(0, 4, 4), /*replicas=*/2),
      ShardWith(flat.narrow(0, 8, 8).view({4, 2}).t()),
      ShardWith(other.narrow(0, 4, 4))};
  const std::vector<GradientGroup> groups = GroupGradients(shards);
  std::vector<std::string> kinds;
  for (const GradientGroup& group : groups) {
    for (const int64_t size : Sizes(group)) {
      kinds.push_back(absl::StrCat(c10::toString(group.dtype), " ",
                                   group.replicas, " ", size));
    }
  }
  EXPECT_THAT(kinds, ::testing::UnorderedElementsAre(
                         "Float 1 4", "Float 1 8", "Float 2 4", "Double 1 8"));
}

TEST(GroupGradientsTest, ARunEndsBeforeAFloatCannotAddItUp) {
  constexpr int64_t kHalf = int64_t{1} << 23;
  const at::Tensor flat = at::empty({3 * kHalf});
  std::vector<TensorRange> shards;
  shards.reserve(3);
  for (int i = 0; i < 3; ++i) {
    shards.push_back(ShardWith(flat.narrow(0, i * kHalf, kHalf)));
  }
  EXPECT_THAT(Sizes(GroupGradients(shards)[0]), ElementsAre(2 * kHalf, kHalf));
}

// Ranks have different gradients in one piece of memory with gaps, which must
// be ignored.
TEST(GroupGradientsTest, ClippingSeesAndScalesEachElementOnce) {
  constexpr int64_t kSizes[] = {7, 1, 12, 4};
  const auto flat_of = [](int rank) {
    return (at::arange(30, at::kFloat) * 0.7 + rank).sin();
  };
  for (const double p :
       {1.0, 2.0, 3.5, std::numeric_limits<double>::infinity()}) {
    double expected = 0;
    for (int rank = 0; rank < 3; ++rank) {
      const double norm =
          flat_of(rank).narrow(0, 2, 24).to(at::kDouble).norm(p).item<double>();
      expected = std::isinf(p) ? std::max(expected, norm)
                               : expected + std::pow(norm, p);
    }
    if (!std::isinf(p)) expected = std::pow(expected, 1 / p);
    EXPECT_OK(comm::testing::RunAllRanks(
        3, [&](comm::Communicator& world) -> absl::Status {
          const at::Tensor flat = flat_of(world.rank());
          std::vector<TensorRange> shards;
          int64_t begin = 2;
          for (const int64_t size : kSizes) {
            shards.push_back(ShardWith(flat.narrow(0, begin, size)));
            begin += size;
          }
          const auto version = shards[1].values.grad()._version();
          ClipGradNormOptions options;
          options.max_norm = expected / 2;
          options.norm_type = p;
          const auto norm = ClipGradNorm(world, shards, options);
          if (!norm.ok()) return norm.status();
          FSDP_RETURN_IF_ERROR(CheckThat(
              norm->item<double>(),
              ::testing::DoubleNear(expected, 1e-5 * expected), "norm"));
          at::Tensor clipped = flat_of(world.rank());
          clipped.narrow(0, 2, 24).mul_(0.5);
          FSDP_RETURN_IF_ERROR(
              CheckTensor(flat, clipped, 1e-5, 1e-7, "clipped gradients"));
          return CheckThat(shards[1].values.grad()._version(),
                           ::testing::Gt(version), "count of writes");
        }));
  }
}

}  // namespace
}  // namespace fsdp
