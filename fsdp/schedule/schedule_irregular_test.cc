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
  EXPECT_TRUE(Answers(schedule, R"(
PreBackward(0): Gather(2)
PreBackward(2): WaitGather(2) Gather(1)
PreBackward(1): WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: Free(2) WaitReduce(1) WaitReduce(0)
)"));
}

TEST(IrregularScheduleTest, UnitWithoutGradientAtItsOutputStillReduces) {
  WatchedSchedule schedule(Layers(2), {});
  Trace(schedule, Forward(2));
  // The guess that unit 2 comes next was wrong, but its gather is in flight.
  EXPECT_TRUE(Answers(schedule, R"(
PreBackward(0): Gather(2)
PostBackward(2): FillReduceBuffer(2) WaitGather(2) Free(2) Reduce(2)
EndOfBackward: Free(0) WaitReduce(2)
)"));
}

TEST(IrregularScheduleTest, ChangedForwardOrderCostsOneGatherPerWrongGuess) {
  WatchedSchedule schedule(Layers(3), {});
  Trace(schedule, Forward(3));
  Trace(schedule, Backward(3));
  EXPECT_TRUE(Answers(schedule, R"(
PreForward(0): Gather(0) WaitGather(0) Gather(1)
PreForward(2): WaitGather(1) Free(1) Gather(2) WaitGather(2) Gather(3)
PostForward(2): Free(2)
PreForward(1): WaitGather(3) Free(3) Gather(1) WaitGather(1)
PostForward(1): Free(1)
PreForward(3): Gather(3) WaitGather(3)
PostForward(3): Free(3)
PostForward(0):
)"));
}

TEST(IrregularScheduleTest, GuessForAUnitThatIsLeftOutEndsWithTheForward) {
  WatchedSchedule schedule(Layers(2), {});
  Trace(schedule, Forward(2));
  Trace(schedule, Backward(2));
  EXPECT_TRUE(Answers(schedule, R"(
PreForward(0): Gather(0) WaitGather(0) Gather(1)
PreForward(1): WaitGather(1) Gather(2)
PostForward(1): Free(1)
PostForward(0): WaitGather(2) Free(2)
)"));
}

TEST(IrregularScheduleTest, RecomputedUnitIsGatheredOnceInBackward) {
  WatchedSchedule schedule(Layers(2), {});
  Trace(schedule, Forward(2));
  EXPECT_TRUE(Answers(schedule, R"(
PreBackward(0): Gather(2)
Recompute PreForward(2): WaitGather(2)
Recompute PostForward(2):
PreBackward(2): Gather(1)
PostBackward(2): FillReduceBuffer(2) Free(2) Reduce(2)
Recompute PreForward(1): WaitGather(1)
Recompute PostForward(1):
PreBackward(1):
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): WaitReduce(2) FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) WaitReduce(0)
PreForward(0): Gather(0) WaitGather(0) Gather(1)
PreForward(1): WaitGather(1) Gather(2)
)"));
}

// For example, forces are the gradient of an energy.
TEST(IrregularScheduleTest, BackwardInsideAForwardLeavesTheRunningUnits) {
  WatchedSchedule schedule(Layers(2), {});
  Trace(schedule, Forward(2));
  Trace(schedule, Backward(2));
  EXPECT_TRUE(Answers(schedule, R"(
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
)"));
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
    EXPECT_TRUE(Answers(schedule, "\nReset:\n"));
    EXPECT_EQ(Trace(schedule, step), expected);
  }
}

}  // namespace
}  // namespace fsdp::testing
