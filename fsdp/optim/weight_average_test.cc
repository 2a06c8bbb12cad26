#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/core/ScalarType.h>

#include <cmath>
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
                  StatusIs(absl::StatusCode::kFailedPrecondition,
                           HasSubstr("InModel")));
      EXPECT_EQ(average.InModel([] {}).code(),
                absl::StatusCode::kFailedPrecondition);
    };
    EXPECT_OK(average.InModel(use));
    EXPECT_EQ(average.InModel([&] { return absl::DataLossError("mine"); }),
              absl::DataLossError("mine"));
    EXPECT_THAT(
        average.InModel([] { throw std::runtime_error("thrown by mine"); }),
        StatusIs(absl::StatusCode::kUnknown, HasSubstr("thrown by mine")));
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
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("between 0 and 1")));
  }
}

}  // namespace
}  // namespace fsdp
