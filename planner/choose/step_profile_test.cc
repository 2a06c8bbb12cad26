#include "planner/choose/step_profile.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::testing::DoubleEq;

ModuleVisit Visit(int module, double seconds, int64_t saved, int64_t input) {
  ModuleVisit visit;
  visit.module = module;
  visit.seconds = seconds;
  visit.saved = saved;
  visit.input = input;
  return visit;
}

// A root embeds and ends, modules 0 and 3; two units have a module each.
StepProfile TwoUnits() {
  StepProfile profile;
  profile.forward = {Visit(0, 1, 10, 0), Visit(1, 4, 100, 10),
                     Visit(2, 6, 200, 20), Visit(3, 3, 40, 30)};
  profile.backward_seconds = 28;
  return profile;
}

UnitMembership TwoUnitsOfOne() {
  return {{0, 1, 2, 0}, {-1, 0, 0}, {false, false, false}};
}

TEST(StepProfileTest, ExtrapolatesAlongALine) {
  const StepProfile one = TwoUnits();
  StepProfile two = one;
  two.forward[1] = Visit(1, 5, 150, 20);
  two.forward[1].working = 7;
  two.forward[1].backward_working = 9;
  two.backward_seconds = 30;
  const StepProfile five = Extrapolate(one, two, 5);
  EXPECT_THAT(five.forward[0].seconds, DoubleEq(1));
  EXPECT_THAT(five.forward[1].seconds, DoubleEq(8));
  EXPECT_EQ(five.forward[1].saved, 300);
  EXPECT_EQ(five.forward[1].input, 50);
  EXPECT_EQ(five.forward[1].working, 28);
  EXPECT_EQ(five.forward[1].backward_working, 36);
  EXPECT_THAT(five.backward_seconds, DoubleEq(36));
}

TEST(StepProfileTest, WhatFallsWithRowsDoesNotBecomeNegative) {
  const StepProfile one = TwoUnits();
  StepProfile two = one;
  two.forward[1] = Visit(1, 2, 10, 1);
  const StepProfile many = Extrapolate(one, two, 1000);
  EXPECT_EQ(many.forward[1].seconds, 0);
  EXPECT_EQ(many.forward[1].saved, 0);
}

TEST(StepProfileTest, ForwardsThatGoOtherWaysAreScaled) {
  StepProfile one = TwoUnits();
  one.forward.pop_back();
  const StepProfile six = Extrapolate(one, TwoUnits(), 6);
  ASSERT_EQ(six.forward.size(), 4u);
  EXPECT_EQ(six.forward[3].saved, 120);
  EXPECT_THAT(six.forward[3].seconds, DoubleEq(9));
}

TEST(ByUnitTest, SharesBackwardOutAsForward) {
  const std::vector<simulator::UnitWork> units =
      ByUnit(TwoUnits(), TwoUnitsOfOne());
  EXPECT_THAT(units[0].forward.seconds, DoubleEq(4));
  EXPECT_THAT(units[0].backward.seconds, DoubleEq(8));
  EXPECT_THAT(units[0].share_before, DoubleEq(0.25));
  EXPECT_THAT(units[1].forward.seconds, DoubleEq(4));
  EXPECT_THAT(units[2].backward.seconds, DoubleEq(12));
  // Nothing is inside these units.
  EXPECT_THAT(units[2].share_before, DoubleEq(1));
}

TEST(ByUnitTest, RecomputationRunsForwardAgainAlsoOfUnitsInside) {
  UnitMembership nested = {{0, 1, 2, 0}, {-1, 0, 1}, {false, true, false}};
  const std::vector<simulator::UnitWork> units = ByUnit(TwoUnits(), nested);
  EXPECT_THAT(units[0].backward.seconds, DoubleEq(8));
  EXPECT_THAT(units[1].backward.seconds, DoubleEq(8 + 4));
  EXPECT_THAT(units[2].backward.seconds, DoubleEq(12 + 6));
}

TEST(ByUnitTest, AForwardThatTakesNoTimeIsNoDivisionByZero) {
  StepProfile profile = TwoUnits();
  for (ModuleVisit& visit : profile.forward) visit.seconds = 0;
  for (const simulator::UnitWork& unit : ByUnit(profile, TwoUnitsOfOne())) {
    EXPECT_EQ(unit.backward.seconds, 0);
  }
}

const std::vector<int64_t> kNoGradients(4, 0);

TEST(ActivationBytesTest, AllThatForwardSavesIsAliveWhenBackwardBegins) {
  EXPECT_EQ(ActivationBytes(TwoUnits(), TwoUnitsOfOne(), kNoGradients),
            10 + 100 + 200 + 40);
  EXPECT_EQ(ActivationBytes({}, {{0}, {-1}, {false}}, {0}), 0);
}

TEST(ActivationBytesTest, WhatAVisitWorksWithComesOnTop) {
  StepProfile profile = TwoUnits();
  profile.forward[1].working = 1000;  // beside the 10 of before
  EXPECT_EQ(ActivationBytes(profile, TwoUnitsOfOne(), kNoGradients), 1010);
  // This is beside its own 100, too, and the gradient at its border.
  profile.forward[1].backward_working = 1000;
  EXPECT_EQ(ActivationBytes(profile, TwoUnitsOfOne(), kNoGradients), 1120);
}

TEST(ActivationBytesTest, GradientsAreHeldUntilTheirUnitIsDone) {
  // The root's last module comes first, then unit 2, then unit 1, with 2
  // reduced.
  EXPECT_EQ(ActivationBytes(TwoUnits(), TwoUnitsOfOne(), {0, 0, 0, 5}), 355);
  // This includes what comes to the borders of the units.
  EXPECT_EQ(ActivationBytes(TwoUnits(), TwoUnitsOfOne(), {0, 0, 50, 5}),
            310 + 55 + 20);
  EXPECT_EQ(ActivationBytes(TwoUnits(), TwoUnitsOfOne(), {0, 500, 50, 5}),
            110 + 505 + 10);
  EXPECT_EQ(ActivationBytes(TwoUnits(), TwoUnitsOfOne(), {5000, 500, 50, 5}),
            10 + 5005);
}

TEST(ActivationBytesTest, OneUnitHoldsAllItsGradients) {
  const UnitMembership one = {{0, 0, 0, 0}, {-1}, {false}};
  EXPECT_EQ(ActivationBytes(TwoUnits(), one, {1000, 1000, 1000, 1000}),
            10 + 4000);
}

// The second use's gradient is added to the first's.
TEST(ActivationBytesTest, AModuleThatIsVisitedTwiceHasOneGradient) {
  StepProfile profile = TwoUnits();
  profile.forward[3].module = 0;
  EXPECT_EQ(ActivationBytes(profile, TwoUnitsOfOne(), {1000, 0, 0, 0}),
            350 + 1000);
}

TEST(ActivationBytesTest, RegionsKeepWhatTheyTakeAndReturn) {
  UnitMembership recomputed = TwoUnitsOfOne();
  recomputed.recomputed = {false, true, true};
  // The root's 10, which unit 1 takes, what unit 1 gives unit 2, and what that
  // gives the root are kept.
  const int64_t kept = 10 + 20 + 30 + 40;
  // In the last unit's backward the root has let go of what it has saved.
  EXPECT_EQ(ActivationBytes(TwoUnits(), recomputed, kNoGradients),
            kept - 40 - 30 + 200 + 3 * 20);
  StepProfile loss = TwoUnits();
  loss.forward[3].backward_working = 1000;
  EXPECT_EQ(ActivationBytes(loss, recomputed, kNoGradients), kept + 1000);
}

TEST(ActivationBytesTest, ARegionRunsItsForwardAgain) {
  StepProfile profile = TwoUnits();
  profile.forward[2].working = 500;
  UnitMembership recomputed = TwoUnitsOfOne();
  recomputed.recomputed = {false, false, true};
  // This is beside the root's 10 and unit 1's 100.
  EXPECT_EQ(ActivationBytes(profile, recomputed, kNoGradients),
            10 + 100 + 500 + 3 * 20);
}

}  // namespace
}  // namespace fsdp
