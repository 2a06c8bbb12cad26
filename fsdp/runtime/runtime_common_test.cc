#include "fsdp/runtime/runtime_common.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "fsdp/runtime/testing/runtime_unit.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

void Add(const char* name, c10::ScalarType stored, c10::ScalarType computed,
         const comm::Communicator& world, RuntimeUnit& unit) {
  AddFlat({{name, {at::zeros({4}, stored)}}}, computed, world, unit);
}

TEST(RuntimeCommonTest, LabelsTellTheFlatParametersOfAUnitApart) {
  ASSERT_OK_AND_ASSIGN(auto group, comm::CreateLocalGroup(1));
  const std::shared_ptr<comm::Communicator> world = std::move(group[0]);
  std::vector<RuntimeUnit> units;
  units.push_back(EmptyUnit("one", {world, {}, {}}));
  Add("p", at::kFloat, at::kFloat, *world, units[0]);
  units.push_back(EmptyUnit("several", {world, {}, {}}));
  Add("p", at::kFloat, at::kFloat, *world, units[1]);
  Add("q", at::kFloat, at::kBFloat16, *world, units[1]);
  Add("frozen", at::kFloat, at::kFloat, *world, units[1]);
  const RuntimeCommon common(world, std::move(units), absl::Seconds(20));
  EXPECT_EQ(common.label(0, 0), "one");
  EXPECT_EQ(common.label(1, 0), "several/Float");
  EXPECT_EQ(common.label(1, 1), "several/Float in BFloat16");
  EXPECT_EQ(common.label(1, 2), "several/Float from frozen on");
}

using ::testing::HasSubstr;

// Three units of one parameter each, all with a gradient.
class UnitStepsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(auto group, comm::CreateLocalGroup(1));
    const std::shared_ptr<comm::Communicator> world = std::move(group[0]);
    std::vector<RuntimeUnit> units;
    units.reserve(3);
    for (int i = 0; i < 3; ++i) {
      units.push_back(testing::UnitOf(at::zeros({4}).set_requires_grad(true),
                                      {world, {}, {}}, *world));
    }
    common_ = std::make_unique<RuntimeCommon>(world, std::move(units),
                                              absl::Seconds(20));
    steps_ = std::make_unique<UnitSteps>(*common_);
    for (int i = 0; i < 3; ++i) Grad(i) = at::ones({4});
  }

  at::Tensor& Grad(int unit) {
    return common_->units()[unit].flats[0]->ShardSlice(0).mutable_grad();
  }
  std::vector<bool> HaveGradients() {
    return {Grad(0).defined(), Grad(1).defined(), Grad(2).defined()};
  }

  std::unique_ptr<RuntimeCommon> common_;
  std::unique_ptr<UnitSteps> steps_;
};

TEST_F(UnitStepsTest, AStepSeesNoGradientThatWaitsForAnotherOne) {
  steps_->Expect(0);
  steps_->Expect(1);
  const at::Tensor waiting = Grad(0);
  std::vector<bool> seen;
  EXPECT_OK(steps_->Step(1, [&](int unit) {
    EXPECT_EQ(unit, 1);
    seen = HaveGradients();
    return absl::OkStatus();
  }));
  EXPECT_EQ(seen, std::vector<bool>({false, true, true}));
  EXPECT_TRUE(Grad(0).is_same(waiting));
}

TEST_F(UnitStepsTest, AStepThatThrowsShowsTheGradientsAgain) {
  steps_->Expect(0);
  steps_->Expect(1);
  EXPECT_THAT(steps_->Step(1,
                           [](int) -> absl::Status {
                             throw std::runtime_error("out of steps");
                           }),
              StatusIs(absl::StatusCode::kUnknown,
                       ::testing::AllOf(HasSubstr("the step of unit unit"),
                                        HasSubstr("out of steps"))));
  EXPECT_EQ(HaveGradients(), std::vector<bool>({true, true, true}));
}

TEST_F(UnitStepsTest, DropsWhatWaitsForAStep) {
  steps_->Expect(0);
  steps_->Expect(1);
  EXPECT_OK(steps_->Step(1, [](int) { return absl::OkStatus(); }));
  steps_->Drop();
  EXPECT_EQ(HaveGradients(), std::vector<bool>({false, true, true}));
}

}  // namespace
}  // namespace fsdp::testing
