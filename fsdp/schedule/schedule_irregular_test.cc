// Steps that do not go as planned: changed orders, units that are left out,
// several forwards, recomputation, errors.
#include <string>

#include "base/testing/status_matchers.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/schedule/testing/schedule_trace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

TEST(IrregularScheduleTest, OutputWithoutUseIsSweptAtTheEndOfBackward) {
  WatchedSchedule schedule(Layers(2), {});
  Trace(schedule, Forward(2));
  EXPECT_EQ(
      Trace(schedule, {PreBackward(0), PreBackward(2), PreBackward(1),
                       PostBackward(1), PostBackward(0), EndOfBackward()}),
      R"(
PreBackward(0): Gather(2)
PreBackward(2): WaitGather(2) Gather(1)
PreBackward(1): WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: Free(2) WaitReduce(1) WaitReduce(0)
)");
  EXPECT_TRUE(AllSharded(schedule, 3));
}

TEST(IrregularScheduleTest, UnitWithoutGradientAtItsOutputStillReduces) {
  WatchedSchedule schedule(Layers(2), {});
  Trace(schedule, Forward(2));
  // The guess that unit 2 comes next was wrong, but its gather is in flight.
  EXPECT_EQ(Trace(schedule, {PreBackward(0), PostBackward(2), EndOfBackward()}),
            R"(
PreBackward(0): Gather(2)
PostBackward(2): FillReduceBuffer(2) WaitGather(2) Free(2) Reduce(2)
EndOfBackward: Free(0) WaitReduce(2)
)");
}

TEST(IrregularScheduleTest, ChangedForwardOrderCostsOneGatherPerWrongGuess) {
  WatchedSchedule schedule(Layers(3), {});
  Trace(schedule, Forward(3));
  Trace(schedule, Backward(3));
  EXPECT_EQ(Trace(schedule, {PreForward(0), PreForward(2), PostForward(2),
                             PreForward(1), PostForward(1), PreForward(3),
                             PostForward(3), PostForward(0)}),
            R"(
PreForward(0): Gather(0) WaitGather(0) Gather(1)
PreForward(2): WaitGather(1) Free(1) Gather(2) WaitGather(2) Gather(3)
PostForward(2): Free(2)
PreForward(1): WaitGather(3) Free(3) Gather(1) WaitGather(1)
PostForward(1): Free(1)
PreForward(3): Gather(3) WaitGather(3)
PostForward(3): Free(3)
PostForward(0):
)");
}

TEST(IrregularScheduleTest, GuessForAUnitThatIsLeftOutEndsWithTheForward) {
  WatchedSchedule schedule(Layers(2), {});
  Trace(schedule, Forward(2));
  Trace(schedule, Backward(2));
  EXPECT_EQ(ActionsOf(schedule, {PreForward(0), PreForward(1), PostForward(1),
                                 PostForward(0)}),
            "Gather(0) WaitGather(0) Gather(1) WaitGather(1) Gather(2) Free(1) "
            "WaitGather(2) Free(2)");
}

TEST(IrregularScheduleTest, ChangedBackwardOrderCostsOneGatherPerWrongGuess) {
  WatchedSchedule schedule(Layers(3), {});
  Trace(schedule, Forward(3));
  EXPECT_EQ(Trace(schedule, {PreBackward(0), PreBackward(2), PostBackward(2),
                             PreBackward(3), PostBackward(3)}),
            R"(
PreBackward(0): Gather(3)
PreBackward(2): WaitGather(3) Free(3) Gather(2) WaitGather(2) Gather(1)
PostBackward(2): FillReduceBuffer(2) Free(2) Reduce(2)
PreBackward(3): WaitGather(1) Free(1) Gather(3) WaitGather(3)
PostBackward(3): FillReduceBuffer(3) Free(3) Reduce(3)
)");
}

TEST(IrregularScheduleTest, BackwardsAfterTwoForwardsGatherTheRootAgain) {
  WatchedSchedule schedule(Layers(1), {});
  EXPECT_EQ(ActionsOf(schedule, Forward(1)),
            "Gather(0) WaitGather(0) Gather(1) WaitGather(1) Free(1)");
  // The shards may have been written in between.
  EXPECT_EQ(ActionsOf(schedule, Forward(1)),
            "Free(0) Gather(0) WaitGather(0) Gather(1) WaitGather(1) Free(1)");
  EXPECT_EQ(ActionsOf(schedule, Backward(1)),
            "Gather(1) WaitGather(1) FillReduceBuffer(1) Free(1) Reduce(1) "
            "FillReduceBuffer(0) Free(0) Reduce(0) WaitReduce(1) "
            "WaitReduce(0)");
  EXPECT_EQ(ActionsOf(schedule, Backward(1)),
            "Gather(0) WaitGather(0) Gather(1) WaitGather(1) "
            "FillReduceBuffer(1) Free(1) Reduce(1) FillReduceBuffer(0) Free(0) "
            "Reduce(0) WaitReduce(1) WaitReduce(0)");
}

TEST(IrregularScheduleTest, RecomputedUnitIsGatheredOnceInBackward) {
  WatchedSchedule schedule(Layers(2), {});
  Trace(schedule, Forward(2));
  EXPECT_EQ(
      Trace(schedule, {PreBackward(0), Recomputes(PreForward(2)),
                       Recomputes(PostForward(2)), PreBackward(2),
                       PostBackward(2), Recomputes(PreForward(1)),
                       Recomputes(PostForward(1)), PreBackward(1),
                       PostBackward(1), PostBackward(0), EndOfBackward()}),
      R"(
PreBackward(0): Gather(2)
PreForward(2): WaitGather(2)
PostForward(2):
PreBackward(2): Gather(1)
PostBackward(2): FillReduceBuffer(2) Free(2) Reduce(2)
PreForward(1): WaitGather(1)
PostForward(1):
PreBackward(1):
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): WaitReduce(2) FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) WaitReduce(0)
)");
  EXPECT_EQ(ActionsOf(schedule, {PreForward(0), PreForward(1)}),
            "Gather(0) WaitGather(0) Gather(1) WaitGather(1) Gather(2)")
      << "recomputation has changed the order of the forward";
}

// The whole model is one region, so no gradient has reached a unit before.
TEST(IrregularScheduleTest, RecomputationMayBeTheFirstEventOfABackward) {
  WatchedSchedule schedule(Layers(1), {});
  Trace(schedule, {PreForwardNoGrad(0), PreForwardNoGrad(1), PostForward(1),
                   PostForward(0)});
  EXPECT_EQ(
      Trace(schedule, {Recomputes(PreForward(0)), Recomputes(PreForward(1)),
                       Recomputes(PostForward(1)), Recomputes(PostForward(0)),
                       PreBackward(0), PreBackward(1), PostBackward(1),
                       PostBackward(0), EndOfBackward()}),
      R"(
PreForward(0):
PreForward(1): Gather(1) WaitGather(1)
PostForward(1):
PostForward(0):
PreBackward(0):
PreBackward(1):
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) WaitReduce(0)
)");
}

TEST(IrregularScheduleTest, RecomputedUnitThatNeedsNoGradientIsFreedAtOnce) {
  WatchedSchedule schedule(Layers(2), {});
  Trace(schedule, Forward(2));
  EXPECT_EQ(ActionsOf(schedule, {PreBackward(0), Recomputes(PreForward(1)),
                                 Recomputes(PostForwardNoGrad(1))}),
            "Gather(2) Gather(1) WaitGather(1) Free(1)");
}

// After a backward that has thrown there is no EndOfBackward.
TEST(IrregularScheduleTest, AForwardOutsideBackwardIsNeverARecomputation) {
  WatchedSchedule schedule(Layers(2), {});
  Trace(schedule, Forward(2));
  Trace(schedule, {PreBackward(0), PreBackward(2)});
  EXPECT_EQ(ActionsOf(schedule, {PreForward(0)}),
            "Free(0) WaitGather(1) Free(1) Free(2) Gather(0) WaitGather(0) "
            "Gather(1)");
}

// For example, forces are the gradient of an energy.
TEST(IrregularScheduleTest, BackwardInsideAForwardLeavesTheRunningUnits) {
  WatchedSchedule schedule(Layers(2), {});
  Trace(schedule, Forward(2));
  Trace(schedule, Backward(2));
  EXPECT_EQ(Trace(schedule,
                  {PreForward(0), PreForward(1), PostForward(1), PreBackward(1),
                   PostBackward(1), EndOfBackward(), PreForward(2),
                   PostForward(2), PostForward(0), PreBackward(0)}),
            R"(
PreForward(0): Gather(0) WaitGather(0) Gather(1)
PreForward(1): WaitGather(1) Gather(2)
PostForward(1): Free(1)
PreBackward(1): WaitGather(2) Free(2) Gather(1) WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
EndOfBackward: WaitReduce(1)
PreForward(2): Gather(2) WaitGather(2)
PostForward(2): Free(2)
PostForward(0):
PreBackward(0): Gather(2)
)");
}

// The loss inside the forward uses the root's own parameters too.
TEST(IrregularScheduleTest, GradientOfAUnitThatStillRunsDoesNotFreeIt) {
  WatchedSchedule schedule(Layers(1), {});
  EXPECT_EQ(Trace(schedule, {PreForward(0), PreForward(1), PostForward(1),
                             PreBackward(1), PostBackward(1), PostBackward(0),
                             EndOfBackward(), PostForwardNoGrad(0)}),
            R"(
PreForward(0): Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PostForward(1): Free(1)
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): FillReduceBuffer(0) Reduce(0)
EndOfBackward: WaitReduce(1) WaitReduce(0)
PostForward(0): Free(0)
)");
}

TEST(IrregularScheduleTest, OneGatheredUnitAtMostMeansNoPrefetchBesideIt) {
  ScheduleOptions options;
  options.max_gathered_units = 1;
  WatchedSchedule schedule(Layers(2), options);
  Trace(schedule, Forward(2));
  Trace(schedule, Backward(2));
  EXPECT_EQ(ActionsOf(schedule, Forward(2)),
            "Gather(0) WaitGather(0) Gather(1) WaitGather(1) Free(1) Gather(2) "
            "WaitGather(2) Free(2)");
}

TEST(ScheduleResetTest, AtEveryPointFreesEverythingAndTheNextStepIsWhole) {
  const Events forward = Forward(3);
  const Events backward = Backward(3);
  Events step = forward;
  step.insert(step.end(), backward.begin(), backward.end());
  for (size_t length = 0; length <= step.size(); ++length) {
    SCOPED_TRACE(length);
    WatchedSchedule schedule(Layers(3), {});
    Trace(schedule, step);
    const std::string expected = Trace(schedule, step);
    Trace(schedule,
          Events(step.begin(), step.begin() + static_cast<int64_t>(length)));
    EXPECT_THAT(schedule.Next(Reset()), IsOk());
    EXPECT_TRUE(AllSharded(schedule, 4));
    EXPECT_FALSE(schedule.in_forward());
    EXPECT_FALSE(schedule.in_backward());
    EXPECT_EQ(schedule.num_reductions_in_flight(), 0);
    EXPECT_EQ(ActionsOf(schedule, {Reset()}), "");
    EXPECT_EQ(Trace(schedule, step), expected);
  }
}

TEST(ScheduleResetTest, EndOfAForwardGivenUpInsideIsRefused) {
  WatchedSchedule schedule(Layers(1), {});
  Trace(schedule, {PreForward(0), PreForward(1), Reset()});
  EXPECT_FALSE(schedule.Next(PostForward(0)).ok());
  EXPECT_TRUE(AllSharded(schedule, 2));
}

}  // namespace
}  // namespace fsdp::testing
