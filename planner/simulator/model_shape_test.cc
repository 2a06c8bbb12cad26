#include "planner/simulator/model_shape.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::simulator {
namespace {

using ::testing::ElementsAre;

TEST(ModelShapeTest, ParametersAreContiguous) {
  EXPECT_THAT(Parameter("a", {2, 3, 4}).strides, ElementsAre(12, 4, 1));
  EXPECT_THAT(Parameter("a", {5}).strides, ElementsAre(1));
  EXPECT_THAT(Parameter("a", {}).strides, ElementsAre());
}

TEST(ModelShapeTest, CountsTheElementsOfAllUnits) {
  ModelShape model;
  EXPECT_EQ(model.num_elements(), 0);
  model.units.resize(2);
  model.units[0].parameters = {Parameter("a", {2, 3}), Parameter("b", {})};
  model.units[1].parameters = {Parameter("c", {5, 0}), Parameter("d", {7})};
  EXPECT_EQ(model.num_elements(), 6 + 1 + 0 + 7);
}

}  // namespace
}  // namespace fsdp::simulator
