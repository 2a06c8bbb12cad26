// Golden traces of each strategy, of requests of the user between steps, of
// ranks that compute with each other's shards, of gradients that are kept,
// whole or as sums of the group of shards, and of steps inside backward.
#include <vector>

#include "base/testing/status_matchers.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/schedule/testing/schedule_trace.h"

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

using Units = std::vector<ScheduledUnit>;

Units ShardOptimizer(int layers) {
  Units units = Layers(layers);
  for (ScheduledUnit& unit : units) {
    unit.reshard_after_forward = false;
    unit.keep_until_sync = true;
  }
  return units;
}

Units Replicated(Units units) {
  for (ScheduledUnit& unit : units) unit.replicated = true;
  return units;
}

Units SharingLayers(int layers) {
  Units units = Layers(layers);
  for (ScheduledUnit& unit : units) unit.shares_memory = true;
  return units;
}

TEST(ShardOptimizerTest, GathersOnceUntilABackwardSynchronizes) {
  WatchedSchedule schedule(ShardOptimizer(1), {});
  Trace(schedule, Forward(1));
  EXPECT_TRUE(Answers(schedule, R"(
PreBackward(0):
PreBackward(1):
Unsync PostBackward(1): Accumulate(1)
Unsync PostBackward(0): Accumulate(0)
Unsync EndOfBackward:
PreForward(0):
PreForward(1):
PostForward(1):
PostForward(0):
PreBackward(0):
PreBackward(1):
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) WaitReduce(0)
)"));
}

TEST(PartsTest, AreKeptFromForwardUntilTheEndOfBackward) {
  Units units = Layers(2);
  for (ScheduledUnit& unit : units) unit.keeps_part = true;
  WatchedSchedule schedule(units, NoPrefetch());
  EXPECT_TRUE(Answers(schedule, R"(
PreForward(0): Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PostForward(1): Shrink(1)
PreForward(2): Gather(2) WaitGather(2)
PostForward(2): Shrink(2)
PostForward(0):
PreBackward(0):
PreBackward(2): Gather(2) WaitGather(2)
PostBackward(2): FillReduceBuffer(2) Free(2) Reduce(2)
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): WaitReduce(2) FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: DropPart(1) DropPart(2) WaitReduce(1) WaitReduce(0)
)"));
}

TEST(ReplicatedTest, AllReducesABackwardAfterTheReduceScatter) {
  WatchedSchedule schedule(Replicated(Layers(3)), NoPrefetch());
  Trace(schedule, Forward(3));
  EXPECT_TRUE(Answers(schedule, R"(
PreBackward(0):
PreBackward(3): Gather(3) WaitGather(3)
PostBackward(3): FillReduceBuffer(3) Free(3) Reduce(3)
PreBackward(2): Gather(2) WaitGather(2)
PostBackward(2): Replicate(3) FillReduceBuffer(2) Free(2) Reduce(2)
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): Replicate(2) WaitReduce(3) FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): Replicate(1) WaitReduce(2) FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: Replicate(0) WaitReduce(1) WaitReduce(0)
)"));
}

TEST(ReshardTest, OfAUnitThatComputesIsRefused) {
  WatchedSchedule schedule(Layers(1), NoPrefetch());
  Trace(schedule, {PreForward(0), PreForward(1)});
  EXPECT_THAT(
      schedule.Next(EventOf("Reshard(1)")),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               HasSubstr("unit1 cannot be resharded while it computes")));
  EXPECT_TRUE(Answers(schedule, R"(
PostForward(1): Free(1)
PostForward(0):
)"));
}

TEST(SharingTest, AStepOpensShardsAndClosesThemOnce) {
  WatchedSchedule schedule(SharingLayers(1), NoPrefetch());
  EXPECT_TRUE(Answers(schedule, R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PostForward(1): Free(1)
PostForward(0): CloseShards(0)
PreBackward(0):
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) WaitReduce(0)
)"));
}

// Gathering anew moves nothing, and shards may have been written.
TEST(SharingTest, NothingIsKeptOverBackwardsThatDoNotSynchronize) {
  Units units = ShardOptimizer(1);
  for (ScheduledUnit& unit : units) unit.shares_memory = true;
  WatchedSchedule schedule(units, NoPrefetch());
  Trace(schedule, Forward(1));
  Trace(schedule, UnsynchronizedBackward(1));
  EXPECT_TRUE(Answers(schedule, R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
)"));
}

ScheduleOptions StepInBackward() {
  ScheduleOptions options = NoPrefetch();
  options.step_in_backward = true;
  return options;
}

TEST(WholeGradientsTest, AreReducedByTheBackwardThatSynchronizes) {
  WatchedSchedule schedule(Layers(1), NoPrefetch());
  Trace(schedule, Forward(1));
  EXPECT_TRUE(Answers(schedule, R"(
PreBackward(0):
PreBackward(1): Gather(1) WaitGather(1)
Unsync PostBackward(1): Accumulate(1) Free(1)
Unsync PostBackward(0): Accumulate(0) Free(0)
Unsync EndOfBackward:
)"));
  Trace(schedule, Forward(1));
  EXPECT_TRUE(Answers(schedule, R"(
PreBackward(0):
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) WaitReduce(0)
)"));
}

TEST(WholeGradientsTest, OfAUnitTheLastBackwardDoesNotReachAreReducedAtItsEnd) {
  WatchedSchedule schedule(Layers(4), NoPrefetch());
  Trace(schedule, Forward(4));
  Trace(schedule, UnsynchronizedBackward(4));
  Trace(schedule, {PreForward(0), PostForward(0)});
  EXPECT_TRUE(Answers(schedule, R"(
PreBackward(0):
Frozen PostBackward(0): Free(0)
EndOfBackward: FillReduceBuffer(0) Reduce(0) FillReduceBuffer(1) Reduce(1) WaitReduce(0) FillReduceBuffer(2) Reduce(2) WaitReduce(1) FillReduceBuffer(3) Reduce(3) WaitReduce(2) FillReduceBuffer(4) Reduce(4) WaitReduce(3) WaitReduce(4)
)"));
}

TEST(StepInBackwardTest, StepsEachUnitOnceItsReductionIsThere) {
  WatchedSchedule schedule(Layers(3), StepInBackward());
  Trace(schedule, Forward(3));
  EXPECT_TRUE(Answers(schedule, R"(
PreBackward(0):
PreBackward(3): Gather(3) WaitGather(3)
PostBackward(3): FillReduceBuffer(3) Free(3) Reduce(3)
PreBackward(2): Gather(2) WaitGather(2)
PostBackward(2): FillReduceBuffer(2) Free(2) Reduce(2)
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): WaitReduce(3) Step(3) FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): WaitReduce(2) Step(2) FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) Step(1) WaitReduce(0) Step(0)
)"));
}

// Returns how many units `events` step.
int StepsOf(WatchedSchedule& schedule, const Events& events) {
  int steps = 0;
  for (const Event& event : events) {
    const absl::StatusOr<Actions> actions = schedule.Next(event);
    EXPECT_OK(actions);
    if (!actions.ok()) return -1;
    for (const Action& action : *actions) {
      steps += action.kind == ActionKind::kStep ? 1 : 0;
    }
  }
  return steps;
}

TEST(StepInBackwardTest, OneLossOfTwoForwardsStepsOnceAllGradientsAreThere) {
  WatchedSchedule schedule(Layers(3), StepInBackward());
  Trace(schedule, Forward(3));
  Trace(schedule, Forward(3));
  Events backward = Backward(3);
  backward.pop_back();
  EXPECT_EQ(StepsOf(schedule, backward), 0);
  EXPECT_EQ(StepsOf(schedule, Backward(3)), 4);
}

TEST(StepInBackwardTest, NeitherOtherStepsNorEvaluationsDeferAStep) {
  WatchedSchedule schedule(Layers(3), StepInBackward());
  Events evaluation = Forward(3);
  for (Event& event : evaluation) {
    event.records_graph = event.expects_backward = false;
  }
  Events backward = Backward(3);
  backward.pop_back();
  // A forward whose loss is dropped may still have its backward in this one.
  Trace(schedule, Forward(3));
  for (const int early : {0, 2, 2}) {
    Trace(schedule, evaluation);
    Trace(schedule, Forward(3));
    EXPECT_EQ(StepsOf(schedule, backward), early);
    EXPECT_EQ(StepsOf(schedule, {EndOfBackward()}), 4 - early);
  }
}

TEST(StepInBackwardTest, RefusesASecondBackwardOfTheSameForward) {
  WatchedSchedule schedule(Layers(1), StepInBackward());
  Trace(schedule, Forward(1));
  Trace(schedule, Backward(1));
  const auto refused =
      StatusIs(absl::StatusCode::kFailedPrecondition,
               HasSubstr("second backward through unit unit1"));
  for (const char* event :
       {"PreBackward(1)", "PostBackward(1)", "Recompute PreForward(1)"}) {
    EXPECT_THAT(schedule.Next(EventOf(event)), refused);
  }
  EXPECT_THAT(schedule.Next(PostBackwardFrozen(1)), IsOk());
  Trace(schedule, {EndOfBackward()});
  // The rest of a failed backward would use new parameters.
  Trace(schedule, {Reset()});
  EXPECT_THAT(schedule.Next(PreBackward(1)), refused);
  Trace(schedule, Forward(1));
  EXPECT_THAT(schedule.Next(PreBackward(1)), IsOk());
}

TEST(StepInBackwardTest, RefusesGradientsOfABackwardInsideAForward) {
  WatchedSchedule schedule(Layers(1), StepInBackward());
  Trace(schedule, {PreForward(0), PreForward(1), PostForward(1)});
  EXPECT_THAT(schedule.Next(PreBackward(1)), IsOk());
  EXPECT_THAT(schedule.Next(PostBackward(1)),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("a backward inside a forward has gradients "
                                 "of unit unit1")));
  EXPECT_TRUE(Answers(schedule, R"(
Unsync PostBackward(1): Accumulate(1) Free(1)
EndOfBackward:
PostForward(0):
PreBackward(0):
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: FillReduceBuffer(1) Reduce(1) WaitReduce(0) Step(0) WaitReduce(1) Step(1)
)"));
}

TEST(SetReductionTest, SumsAreKeptForTheBackwardThatAllReduces) {
  WatchedSchedule schedule(Replicated(Layers(1)), NoPrefetch());
  Trace(schedule,
        {EventOf("Local SetReduction(0)"), EventOf("Local SetReduction(1)")});
  Trace(schedule, Forward(1));
  EXPECT_TRUE(Answers(schedule, R"(
PreBackward(0):
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: KeepSums(1) KeepSums(0)
)"));
  Trace(schedule, {EventOf("SetReduction(0)"), EventOf("SetReduction(1)")});
  Trace(schedule, Forward(1));
  EXPECT_TRUE(Answers(schedule, R"(
PreBackward(0):
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): Replicate(1) FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: Replicate(0) WaitReduce(1) WaitReduce(0)
)"));
}

TEST(SetReductionTest, SumsAreForgottenWithTheGradientsAndChoicesAreNot) {
  WatchedSchedule schedule(Replicated(Layers(1)), NoPrefetch());
  Trace(schedule, {EventOf("Unsync Local SetReduction(1)"),
                   EventOf("Local SetReduction(0)")});
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
  Trace(schedule, {EventOf("SetReduction(0)"), EventOf("SetReduction(1)"),
                   PreForward(0), PostForward(0)});
  EXPECT_TRUE(Answers(schedule, "\nEndOfBackward: Free(0)\n"));
}

}  // namespace
}  // namespace fsdp::testing
