#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "fsdp/optim/training_step.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

at::Tensor Parameter(double value, at::ScalarType dtype = at::kFloat) {
  return at::tensor({value, -value}, at::kDouble).to(dtype).requires_grad_();
}

void Set(const at::Tensor& parameter, double value) {
  parameter.detach().copy_(Parameter(value));
}

double Value(const at::Tensor& tensor) { return tensor[0].item<double>(); }

TEST(WeightAverageTest, IsAnExponentialMovingAverage) {
  // In bfloat16, a change of a tenth of 1/256 would be lost.
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const at::Tensor parameter = Parameter(1, dtype);
    const at::Tensor frozen = Parameter(7).requires_grad_(false);
    WeightAverage average({parameter, frozen});
    EXPECT_FALSE(average.Of(frozen).defined());
    EXPECT_EQ(Value(average.Of(parameter)), 1);
    Set(parameter, 2);
    ASSERT_OK(average.Update(0.9));  // the first one copies
    Set(parameter, 2 + 1.0 / 64);
    ASSERT_OK(average.Update(0.9));
    Set(parameter, 3);
    ASSERT_OK(average.Update(0.75));
    const double expected = 0.75 * (2 + 0.1 / 64) + 0.25 * 3;
    EXPECT_NEAR(Value(average.Of(parameter)), expected, 1e-6) << dtype;
    EXPECT_NEAR(average.Of(parameter)[1].item<double>(), -expected, 1e-6);
    EXPECT_EQ(average.Of(parameter).scalar_type(),
              dtype == at::kBFloat16 ? at::kFloat : dtype);
    EXPECT_FALSE(average.Of(parameter).requires_grad());
    EXPECT_EQ(Value(parameter), 3);
  }
}

TEST(WeightAverageTest, IsInTheModelForAWhile) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const std::vector<at::Tensor> parameters = {Parameter(1, dtype),
                                                Parameter(5, dtype)};
    WeightAverage average(parameters);
    EXPECT_OK(average.InModel([&] { EXPECT_EQ(Value(parameters[1]), 5); }));
    ASSERT_OK(average.Update(0.5));
    Set(parameters[0], 2);
    Set(parameters[1], 7);
    ASSERT_OK(average.Update(0.5));
    const auto use = [&] {
      EXPECT_TRUE(average.is_in_model());
      EXPECT_EQ(Value(parameters[0]), 1.5);
      EXPECT_EQ(Value(parameters[1]), 6);
      EXPECT_THAT(average.Update(0.5),
                  StatusIs(Code::kFailedPrecondition, HasSubstr("InModel")));
      EXPECT_EQ(average.InModel([] {}).code(), Code::kFailedPrecondition);
    };
    EXPECT_OK(average.InModel(use));
    EXPECT_EQ(average.InModel([&] { return absl::DataLossError("mine"); }),
              absl::DataLossError("mine"));
    EXPECT_THAT(
        average.InModel([] { throw std::runtime_error("thrown by mine"); }),
        StatusIs(Code::kUnknown, HasSubstr("thrown by mine")));
    EXPECT_FALSE(average.is_in_model());
    EXPECT_EQ(Value(parameters[0]), 2);
    EXPECT_EQ(Value(parameters[1]), 7);
    EXPECT_OK(average.InModel(use));
    ASSERT_OK(average.Update(0));
    EXPECT_EQ(Value(average.Of(parameters[1])), 7);
  }
}

TEST(WeightAverageTest, RefusesWhatIsNoDecay) {
  WeightAverage average({Parameter(1)});
  for (const double decay : {-0.1, 1.1, std::nan("")}) {
    EXPECT_THAT(average.Update(decay),
                StatusIs(Code::kInvalidArgument, HasSubstr("between 0 and 1")));
  }
}

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
  // Without a warm-up the first step has the peak, and the last one of a run
  // that is all warm-up.
  EXPECT_DOUBLE_EQ(WarmUpCosine::At(0, {0, /*steps=*/2, /*floor=*/0}), 1);
  EXPECT_DOUBLE_EQ(WarmUpCosine::At(1, {0, /*steps=*/2, /*floor=*/0}), 0.5);
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
