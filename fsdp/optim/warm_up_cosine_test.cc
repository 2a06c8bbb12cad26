#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "fsdp/optim/training_step.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

TEST(WarmUpCosineTest, RisesInALineAndFallsAsACosine) {
  const auto rate = [](int64_t step) {
    return 8 * WarmUpCosine::At(step, {/*warm_up=*/4, /*steps=*/16,
                                       /*floor=*/0.25});
  };
  EXPECT_DOUBLE_EQ(rate(0), 2);
  EXPECT_DOUBLE_EQ(rate(1), 4);
  EXPECT_DOUBLE_EQ(rate(3), 8);
  EXPECT_DOUBLE_EQ(rate(4), 8);
  // A third of the way: cos(60 degrees) is a half.
  EXPECT_DOUBLE_EQ(rate(8), 2 + 6 * 0.75);
  EXPECT_DOUBLE_EQ(rate(10), 2 + 6 * 0.5);
  EXPECT_DOUBLE_EQ(rate(16), 2);
  EXPECT_DOUBLE_EQ(rate(1000), 2);
}

TEST(WarmUpCosineTest, WithoutWarmUpTheFirstStepHasThePeak) {
  EXPECT_DOUBLE_EQ(WarmUpCosine::At(0, {0, /*steps=*/2, /*floor=*/0}), 1);
  EXPECT_DOUBLE_EQ(WarmUpCosine::At(1, {0, /*steps=*/2, /*floor=*/0}), 0.5);
}

TEST(WarmUpCosineTest, AFloorOfOneIsConstant) {
  for (int step = 0; step < 9; ++step) {
    EXPECT_DOUBLE_EQ(WarmUpCosine::At(step, {0, /*steps=*/9, /*floor=*/1}), 1);
  }
}

TEST(WarmUpCosineTest, ARunThatIsAllWarmUpEndsAtThePeak) {
  EXPECT_DOUBLE_EQ(WarmUpCosine::At(2, {/*warm_up=*/3, /*steps=*/3, 0}), 1);
}

TEST(WarmUpCosineTest, GroupsHaveTheirOwnPeaksAndTheRateOfTheNextStep) {
  using torch::optim::SGDOptions;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const double rate : {8.0, 2.0}) {
    groups.emplace_back(
        std::vector<at::Tensor>{at::ones({1}).set_requires_grad(true)},
        std::make_unique<SGDOptions>(rate));
  }
  torch::optim::SGD optimizer(groups, SGDOptions(1));
  const WarmUpCosineOptions options{/*warm_up=*/2, /*steps=*/8, /*floor=*/0.5};
  WarmUpCosine scheduler(optimizer, options);
  const std::vector<double> parts = {0.5, 1, 1, WarmUpCosine::At(3, options),
                                     WarmUpCosine::At(4, options)};
  for (const double part : parts) {
    EXPECT_DOUBLE_EQ(optimizer.param_groups()[0].options().get_lr(), 8 * part);
    EXPECT_DOUBLE_EQ(optimizer.param_groups()[1].options().get_lr(), 2 * part);
    optimizer.step();
    scheduler.step();
  }
}

}  // namespace
}  // namespace fsdp
