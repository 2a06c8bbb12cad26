#include "base/testing/largest_difference.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "base/testing/check_that.h"
#include "base/testing/status_matchers.h"

namespace fsdp::testing {
namespace {

TEST(LargestDifferenceTest, IsThatOfOneElementInAnyDtypes) {
  const at::Tensor bytes = at::zeros({2, 3}, at::kByte);
  const at::Tensor floats = at::zeros({2, 3});
  floats[1][2] = 0.5;
  floats[0][1] = -3;
  EXPECT_EQ(LargestDifference(bytes, bytes), 0);
  EXPECT_EQ(LargestDifference(bytes, floats), 3);
  EXPECT_EQ(LargestDifference(bytes, at::full({2, 3}, 255, at::kByte)), 255);
  EXPECT_EQ(LargestDifference(at::zeros({0}), at::zeros({0})), 0);
}

TEST(LargestDifferenceTest, IsInfiniteBetweenOtherSizes) {
  EXPECT_GT(LargestDifference(at::zeros({2}), at::zeros({3})), 1e300);
}

TEST(CheckThatTest, ShowsTheValue) {
  EXPECT_OK(CheckThat(3, 3, "steps"));
  EXPECT_THAT(
      CheckThat(2.5, ::testing::DoubleNear(3, 0.25), "norm"),
      StatusIs(absl::StatusCode::kInternal,
               ::testing::MatchesRegex(
                   "norm: expected what .* 3.*, got 2.5, which is -0.5 from "
                   "3")));
}

}  // namespace
}  // namespace fsdp::testing
