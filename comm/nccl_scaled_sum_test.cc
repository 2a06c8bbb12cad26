#include "comm/nccl_scaled_sum.h"

#include <c10/core/ScalarType.h>

#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

TEST(SpreadScaleTest, ExactScalesGoIntoTheReduction) {
  for (at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (double scale : {1.0, 0.5, 0.125, 4.0}) {
      const NcclScaling scaling = SpreadScale(scale, dtype, 8);
      EXPECT_EQ(scaling.before, scale);
      EXPECT_EQ(scaling.after, 1);
    }
  }
}

TEST(SpreadScaleTest, HalvesAreNotMultipliedWithARoundedScale) {
  for (at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    for (double scale : {1.0 / 3, 1.0 / 5, 1e-9}) {
      const NcclScaling scaling = SpreadScale(scale, dtype, 3);
      EXPECT_EQ(scaling.before, 1);
      EXPECT_EQ(scaling.after, scale);
    }
  }
  EXPECT_EQ(SpreadScale(1.0 / 3, at::kFloat, 3).before, 1.0 / 3);
}

TEST(SpreadScaleTest, OneRankHasNothingToReduce) {
  const NcclScaling scaling = SpreadScale(0.5, at::kFloat, 1);
  EXPECT_EQ(scaling.before, 1);
  EXPECT_EQ(scaling.after, 0.5);
}

}  // namespace
}  // namespace fsdp::comm
