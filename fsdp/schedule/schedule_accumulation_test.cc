// Gradients that are kept, whole or as sums of the group of shards, and steps
// inside backward.
#include <vector>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/schedule/testing/schedule_trace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

ScheduleOptions StepInBackward() {
  ScheduleOptions options = NoPrefetch();
  options.step_in_backward = true;
  return options;
}

TEST(WholeGradientsTest, AreReducedByTheBackwardThatSynchronizes) {
  WatchedSchedule schedule(Layers(1), NoPrefetch());
  for (int i = 0; i < 2; ++i) {
    Trace(schedule, Forward(1));
    EXPECT_EQ(Trace(schedule, UnsynchronizedBackward(1)), R"(
PreBackward(0):
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): Accumulate(1) Free(1)
PostBackward(0): Accumulate(0) Free(0)
EndOfBackward:
)");
  }
  Trace(schedule, Forward(1));
  EXPECT_EQ(Trace(schedule, Backward(1)), R"(
PreBackward(0):
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) WaitReduce(0)
)");
}

TEST(WholeGradientsTest, OfAUnitTheLastBackwardDoesNotReachAreReducedAtItsEnd) {
  WatchedSchedule schedule(Layers(2), NoPrefetch());
  Trace(schedule, Forward(2));
  Trace(schedule, UnsynchronizedBackward(2));
  Trace(schedule,
        {PreForward(0), PreForward(1), PostForward(1), PostForward(0)});
  EXPECT_EQ(Trace(schedule, {PreBackward(0), PreBackward(1), PostBackward(1),
                             PostBackward(0), EndOfBackward()}),
            R"(
PreBackward(0):
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) FillReduceBuffer(2) Reduce(2) WaitReduce(0) WaitReduce(2)
)");
}

TEST(WholeGradientsTest, OfManyUnitsAreReducedWithinTheLimitOfBuffers) {
  WatchedSchedule schedule(Layers(4), NoPrefetch());
  Trace(schedule, Forward(4));
  Trace(schedule, UnsynchronizedBackward(4));
  Trace(schedule, {PreForward(0), PostForward(0)});
  EXPECT_EQ(ActionsOf(schedule,
                      {PreBackward(0), PostBackwardFrozen(0), EndOfBackward()}),
            "Free(0) FillReduceBuffer(0) Reduce(0) FillReduceBuffer(1) "
            "Reduce(1) WaitReduce(0) FillReduceBuffer(2) Reduce(2) "
            "WaitReduce(1) FillReduceBuffer(3) Reduce(3) WaitReduce(2) "
            "FillReduceBuffer(4) Reduce(4) WaitReduce(3) WaitReduce(4)");
}

TEST(WholeGradientsTest, OutliveAnIterationThatIsGivenUp) {
  WatchedSchedule schedule(Layers(1), NoPrefetch());
  Trace(schedule, Forward(1));
  Trace(schedule, UnsynchronizedBackward(1));
  Trace(schedule, {Reset()});
  Trace(schedule, Forward(1));
  EXPECT_EQ(ActionsOf(schedule, {PreBackward(0), EndOfBackward()}),
            "Free(0) FillReduceBuffer(0) Reduce(0) FillReduceBuffer(1) "
            "Reduce(1) WaitReduce(0) WaitReduce(1)");
  Trace(schedule, Forward(1));
  Trace(schedule, UnsynchronizedBackward(1));
  Trace(schedule, {Reset()});
  schedule.SetKept(1, /*whole_gradients=*/false, /*sums=*/false);
  Trace(schedule, Forward(1));
  EXPECT_EQ(ActionsOf(schedule, {PreBackward(0), EndOfBackward()}),
            "Free(0) FillReduceBuffer(0) Reduce(0) WaitReduce(0)");
}

TEST(StepInBackwardTest, StepsEachUnitOnceItsReductionIsThere) {
  WatchedSchedule schedule(Layers(3), StepInBackward());
  Trace(schedule, Forward(3));
  EXPECT_EQ(Trace(schedule, Backward(3)), R"(
PreBackward(0):
PreBackward(3): Gather(3) WaitGather(3)
PostBackward(3): FillReduceBuffer(3) Free(3) Reduce(3)
PreBackward(2): Gather(2) WaitGather(2)
PostBackward(2): FillReduceBuffer(2) Free(2) Reduce(2)
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): WaitReduce(3) Step(3) FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): WaitReduce(2) Step(2) FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) Step(1) WaitReduce(0) Step(0)
)");
}

TEST(StepInBackwardTest, AUnitUsedTwiceStepsAfterItsLastReduction) {
  ScheduleOptions options = StepInBackward();
  options.max_reduce_buffers = 1;
  WatchedSchedule schedule(Layers(1), options);
  Trace(schedule, {PreForward(0), PreForward(1), PostForward(1), PreForward(1),
                   PostForward(1), PostForward(0)});
  EXPECT_EQ(Trace(schedule, {PreBackward(0), PreBackward(1), PostBackward(1),
                             PreBackward(1), PostBackward(1), PostBackward(0),
                             EndOfBackward()}),
            R"(
PreBackward(0):
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): WaitReduce(1) FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): WaitReduce(1) Step(1) FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(0) Step(0)
)");
}

TEST(StepInBackwardTest, AUnitRecomputedTwiceStepsAfterItsLastReduction) {
  ScheduleOptions options = StepInBackward();
  options.max_reduce_buffers = 1;
  WatchedSchedule schedule(Layers(1), options);
  Trace(schedule, {PreForward(0), PreForwardNoGrad(1), PostForwardNoGrad(1),
                   PreForwardNoGrad(1), PostForwardNoGrad(1), PostForward(0)});
  EXPECT_EQ(
      Trace(schedule, {PreBackward(0), Recomputes(PreForward(1)),
                       Recomputes(PostForward(1)), Recomputes(PreForward(1)),
                       Recomputes(PostForward(1)), PreBackward(1),
                       PostBackward(1), PreBackward(1), PostBackward(1),
                       PostBackward(0), EndOfBackward()}),
      R"(
PreBackward(0):
PreForward(1): Gather(1) WaitGather(1)
PostForward(1):
PreForward(1):
PostForward(1):
PreBackward(1):
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): WaitReduce(1) FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): WaitReduce(1) Step(1) FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(0) Step(0)
)");
}

TEST(StepInBackwardTest, RefusesASecondBackwardOfTheSameForward) {
  WatchedSchedule schedule(Layers(1), StepInBackward());
  Trace(schedule, Forward(1));
  Trace(schedule, Backward(1));
  const auto refused =
      StatusIs(absl::StatusCode::kFailedPrecondition,
               HasSubstr("second backward through unit unit1"));
  for (const Event& event :
       {PreBackward(1), PostBackward(1), Recomputes(PreForward(1))}) {
    EXPECT_THAT(schedule.Next(event), refused);
  }
  EXPECT_THAT(schedule.Next(PostBackwardFrozen(1)), IsOk());
  Trace(schedule, {EndOfBackward()});
  // The rest of a failed backward would use new parameters.
  Trace(schedule, {Reset()});
  EXPECT_THAT(schedule.Next(PreBackward(1)), refused);
  Trace(schedule, Forward(1));
  EXPECT_THAT(schedule.Next(PreBackward(1)), IsOk());
}

TEST(StepInBackwardTest, WritesNoShardThatAGatherForTheUserReads) {
  ScheduleOptions options = StepInBackward();
  options.max_reduce_buffers = 1;
  WatchedSchedule schedule(Layers(1), options);
  Trace(schedule, Forward(1));
  EXPECT_EQ(
      ActionsOf(schedule, {PreBackward(0), PreBackward(1), PostBackward(1),
                           Unshard(1), PostBackward(0), EndOfBackward()}),
      "Gather(1) WaitGather(1) FillReduceBuffer(1) Free(1) Reduce(1) "
      "Gather(1) WaitReduce(1) WaitGather(1) Step(1) FillReduceBuffer(0) "
      "Free(0) Reduce(0) Free(1) WaitReduce(0) Step(0)");
}

TEST(StepInBackwardTest, RefusesGradientsOfABackwardInsideAForward) {
  WatchedSchedule schedule(Layers(1), StepInBackward());
  Trace(schedule, {PreForward(0), PreForward(1), PostForward(1)});
  EXPECT_THAT(schedule.Next(PreBackward(1)), IsOk());
  EXPECT_THAT(schedule.Next(PostBackward(1)),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("a backward inside a forward has gradients "
                                 "of unit unit1")));
  EXPECT_THAT(schedule.Next(Unsynchronized(PostBackward(1))), IsOk());
  EXPECT_THAT(schedule.Next(EndOfBackward()), IsOk());
  EXPECT_EQ(ActionsOf(schedule, {PostForward(0), PreBackward(0),
                                 PostBackward(0), EndOfBackward()}),
            "FillReduceBuffer(0) Free(0) Reduce(0) FillReduceBuffer(1) "
            "Reduce(1) WaitReduce(0) Step(0) WaitReduce(1) Step(1)");
}

Event SetReduction(int unit, bool synchronizes, bool all_reduces) {
  Event event{EventKind::kSetReduction, unit};
  event.synchronizes = synchronizes;
  event.all_reduces = all_reduces;
  return event;
}

std::vector<ScheduledUnit> Replicated(int layers) {
  std::vector<ScheduledUnit> units = Layers(layers);
  for (ScheduledUnit& unit : units) unit.replicated = true;
  return units;
}

TEST(SetReductionTest, SumsAreKeptForTheBackwardThatAllReduces) {
  WatchedSchedule schedule(Replicated(1), NoPrefetch());
  Trace(schedule, {SetReduction(0, true, false), SetReduction(1, true, false)});
  for (int i = 0; i < 2; ++i) {
    Trace(schedule, Forward(1));
    EXPECT_EQ(Trace(schedule, Backward(1)), R"(
PreBackward(0):
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: KeepSums(1) KeepSums(0)
)");
  }
  Trace(schedule, {SetReduction(0, true, true), SetReduction(1, true, true)});
  Trace(schedule, Forward(1));
  EXPECT_EQ(Trace(schedule, Backward(1)), R"(
PreBackward(0):
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): Replicate(1) FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: Replicate(0) WaitReduce(1) WaitReduce(0)
)");
}

TEST(SetReductionTest, SumsOfAUnitThatIsNotReachedAreReplicatedAtTheEnd) {
  WatchedSchedule schedule(Replicated(1), NoPrefetch());
  Trace(schedule, {SetReduction(1, true, false)});
  Trace(schedule, Forward(1));
  Trace(schedule, Backward(1));
  const Events root = {PreForward(0), PostForward(0), PreBackward(0),
                       PostBackward(0), EndOfBackward()};
  EXPECT_EQ(Trace(schedule, root), R"(
PreForward(0): Gather(0) WaitGather(0)
PostForward(0):
PreBackward(0):
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: Replicate(0) WaitReduce(0)
)");
  Trace(schedule, {SetReduction(1, true, true)});
  EXPECT_EQ(Trace(schedule, root), R"(
PreForward(0): Gather(0) WaitGather(0)
PostForward(0):
PreBackward(0):
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: Replicate(0) WaitReduce(0) ReplicateSums(1) WaitReduce(1)
)");
}

TEST(SetReductionTest, AUnitAloneMayKeepItsGradientsWhole) {
  WatchedSchedule schedule(Layers(1), NoPrefetch());
  Trace(schedule, {SetReduction(1, false, true)});
  Trace(schedule, Forward(1));
  EXPECT_EQ(Trace(schedule, Backward(1)), R"(
PreBackward(0):
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): Accumulate(1) Free(1)
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(0)
)");
  Trace(schedule, {SetReduction(1, true, true), PreForward(0), PostForward(0)});
  EXPECT_EQ(Trace(schedule, {PreBackward(0), PostBackward(0), EndOfBackward()}),
            R"(
PreBackward(0):
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: FillReduceBuffer(1) Reduce(1) WaitReduce(0) WaitReduce(1)
)");
}

// Other units are stepped after that backward, and this one may be, too.
TEST(SetReductionTest, SuchAUnitIsNotKeptGathered) {
  std::vector<ScheduledUnit> units = Layers(1);
  units[1].reshard_after_forward = false;
  units[1].keep_until_sync = true;
  WatchedSchedule schedule(units, NoPrefetch());
  Trace(schedule, {SetReduction(1, false, true)});
  Trace(schedule, Forward(1));
  Trace(schedule, Backward(1));
  EXPECT_FALSE(schedule.IsUnsharded(1));
}

TEST(SetReductionTest, SumsAreForgottenWithTheGradientsAndChoicesAreNot) {
  WatchedSchedule schedule(Replicated(1), NoPrefetch());
  Trace(schedule,
        {SetReduction(1, false, false), SetReduction(0, true, false)});
  Trace(schedule, Forward(1));
  Trace(schedule, Backward(1));
  for (int unit : {0, 1}) {
    schedule.SetKept(unit, /*whole_gradients=*/false, /*sums=*/false);
  }
  Trace(schedule, {Reset()});
  EXPECT_FALSE(schedule.synchronizes(1));
  EXPECT_FALSE(schedule.all_reduces(1));
  EXPECT_TRUE(schedule.synchronizes(0));
  EXPECT_FALSE(schedule.all_reduces(0));
  Trace(schedule, {SetReduction(0, true, true), SetReduction(1, true, true),
                   PreForward(0), PostForward(0)});
  EXPECT_EQ(Trace(schedule, {EndOfBackward()}), "\nEndOfBackward: Free(0)\n");
}

TEST(SetReductionTest, IsRefusedInsideAForwardOrBackward) {
  WatchedSchedule schedule(Layers(1), NoPrefetch());
  const auto refused = StatusIs(absl::StatusCode::kFailedPrecondition,
                                HasSubstr("cannot change"));
  Trace(schedule, {PreForward(0)});
  EXPECT_THAT(schedule.Next(SetReduction(1, false, true)), refused);
  Trace(schedule, {PostForward(0), PreBackward(0)});
  EXPECT_THAT(schedule.Next(SetReduction(1, false, true)), refused);
}

}  // namespace

}  // namespace fsdp::testing
