#include "examples/llama/training/learning_rate.h"

#include "gtest/gtest.h"

namespace llama {
namespace {

TEST(LearningRateTest, RisesInALineAndFallsAsACosine) {
  const LearningRate rate{/*peak=*/8, /*warmup=*/4, /*steps=*/16,
                          /*floor=*/0.25};
  EXPECT_DOUBLE_EQ(rate.At(0), 2);
  EXPECT_DOUBLE_EQ(rate.At(1), 4);
  EXPECT_DOUBLE_EQ(rate.At(3), 8);
  EXPECT_DOUBLE_EQ(rate.At(4), 8);
  // A third of the way: cos(60 degrees) is a half.
  EXPECT_DOUBLE_EQ(rate.At(8), 2 + 6 * 0.75);
  EXPECT_DOUBLE_EQ(rate.At(10), 2 + 6 * 0.5);
  EXPECT_DOUBLE_EQ(rate.At(16), 2);
  EXPECT_DOUBLE_EQ(rate.At(1000), 2);
}

TEST(LearningRateTest, WithoutWarmUpTheFirstStepHasThePeak) {
  const LearningRate rate{/*peak=*/1, /*warmup=*/0, /*steps=*/2, /*floor=*/0};
  EXPECT_DOUBLE_EQ(rate.At(0), 1);
  EXPECT_DOUBLE_EQ(rate.At(1), 0.5);
}

TEST(LearningRateTest, AFloorOfOneIsConstant) {
  const LearningRate rate{/*peak=*/3, /*warmup=*/0, /*steps=*/9, /*floor=*/1};
  for (int step = 0; step < 9; ++step) EXPECT_DOUBLE_EQ(rate.At(step), 3);
}

TEST(LearningRateTest, ARunThatIsAllWarmUpEndsAtThePeak) {
  const LearningRate rate{/*peak=*/3, /*warmup=*/3, /*steps=*/3, /*floor=*/0};
  EXPECT_DOUBLE_EQ(rate.At(2), 3);
}

}  // namespace
}  // namespace llama
