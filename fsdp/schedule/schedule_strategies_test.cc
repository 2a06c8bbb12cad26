// Golden traces of each strategy, and of requests of the user between steps:
// units are gathered ahead, freed, or all left alone.
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

using Units = std::vector<ScheduledUnit>;

Units ShardGradOp(int layers) {
  Units units = Layers(layers);
  for (ScheduledUnit& unit : units) unit.reshard_after_forward = false;
  return units;
}

Units ShardOptimizer(int layers) {
  Units units = ShardGradOp(layers);
  for (ScheduledUnit& unit : units) unit.keep_until_sync = true;
  return units;
}

Units Replicated(Units units) {
  for (ScheduledUnit& unit : units) unit.replicated = true;
  return units;
}

Units NotSharded(int layers) {
  Units units = Replicated(ShardOptimizer(layers));
  for (ScheduledUnit& unit : units) unit.sharded = false;
  return units;
}

Units WithParts(int layers) {
  Units units = Layers(layers);
  for (ScheduledUnit& unit : units) unit.keeps_part = true;
  return units;
}

TEST(ShardGradOpTest, FreesAfterEachBackwardAlsoWithoutSynchronization) {
  WatchedSchedule schedule(ShardGradOp(1), NoPrefetch());
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(ActionsOf(schedule, Forward(1)),
              "Gather(0) WaitGather(0) Gather(1) WaitGather(1)");
    EXPECT_EQ(ActionsOf(schedule, UnsynchronizedBackward(1)),
              "Accumulate(1) Free(1) Accumulate(0) Free(0)");
  }
}

TEST(ShardOptimizerTest, GathersOnceUntilABackwardSynchronizes) {
  WatchedSchedule schedule(ShardOptimizer(1), {});
  EXPECT_EQ(ActionsOf(schedule, Forward(1)),
            "Gather(0) WaitGather(0) Gather(1) WaitGather(1)");
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(ActionsOf(schedule, UnsynchronizedBackward(1)),
              "Accumulate(1) Accumulate(0)");
    EXPECT_EQ(ActionsOf(schedule, Forward(1)), "");
  }
  EXPECT_EQ(ActionsOf(schedule, Backward(1)),
            "FillReduceBuffer(1) Free(1) Reduce(1) FillReduceBuffer(0) Free(0) "
            "Reduce(0) WaitReduce(1) WaitReduce(0)");
  EXPECT_TRUE(AllSharded(schedule, 2));
}

TEST(ShardOptimizerTest, AUnitTheLastBackwardDoesNotReachIsFreedAtItsEnd) {
  WatchedSchedule schedule(ShardOptimizer(2), NoPrefetch());
  Trace(schedule, Forward(2));
  Trace(schedule, UnsynchronizedBackward(2));
  EXPECT_EQ(ActionsOf(schedule, {PreForward(0), PreForward(1), PostForward(1),
                                 PostForward(0), PreBackward(0), PreBackward(1),
                                 PostBackward(1), PostBackward(0)}),
            "FillReduceBuffer(1) Free(1) Reduce(1) FillReduceBuffer(0) Free(0) "
            "Reduce(0)");
  EXPECT_EQ(ActionsOf(schedule, {EndOfBackward()}),
            "Free(2) WaitReduce(1) FillReduceBuffer(2) Reduce(2) "
            "WaitReduce(0) WaitReduce(2)");
  EXPECT_TRUE(AllSharded(schedule, 3));
}

TEST(ShardOptimizerTest, AForwardWithoutGradFreesWhatWasKept) {
  WatchedSchedule schedule(ShardOptimizer(1), NoPrefetch());
  Trace(schedule, Forward(1));
  Trace(schedule, UnsynchronizedBackward(1));
  EXPECT_EQ(ActionsOf(schedule, {PreForwardNoGrad(0), PreForwardNoGrad(1),
                                 PostForwardNoGrad(1), PostForwardNoGrad(0)}),
            "Free(1) Free(0)");
}

TEST(PartsTest, AreKeptFromForwardUntilTheEndOfBackward) {
  WatchedSchedule schedule(WithParts(2), NoPrefetch());
  EXPECT_EQ(Trace(schedule, Forward(2)), R"(
PreForward(0): Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PostForward(1): Shrink(1)
PreForward(2): Gather(2) WaitGather(2)
PostForward(2): Shrink(2)
PostForward(0):
)");
  EXPECT_EQ(Trace(schedule, Backward(2)), R"(
PreBackward(0):
PreBackward(2): Gather(2) WaitGather(2)
PostBackward(2): FillReduceBuffer(2) Free(2) Reduce(2)
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): WaitReduce(2) FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: DropPart(1) DropPart(2) WaitReduce(1) WaitReduce(0)
)");
}

TEST(PartsTest, OfAUnitUsedTwiceAreTakenOnce) {
  WatchedSchedule schedule(WithParts(1), NoPrefetch());
  EXPECT_EQ(
      ActionsOf(schedule, {PreForward(0), PreForward(1), PostForward(1),
                           PreForward(1), PostForward(1), PostForward(0)}),
      "Gather(0) WaitGather(0) Gather(1) WaitGather(1) Shrink(1) Gather(1) "
      "WaitGather(1) Free(1)");
}

TEST(PartsTest, AreDroppedByANewIteration) {
  WatchedSchedule schedule(WithParts(1), NoPrefetch());
  Trace(schedule, Forward(1));
  EXPECT_EQ(ActionsOf(schedule, {PreForward(0)}),
            "Free(0) DropPart(1) Gather(0) WaitGather(0)");
}

TEST(PartsTest, AreNotTakenWithoutGrad) {
  WatchedSchedule schedule(WithParts(1), NoPrefetch());
  EXPECT_EQ(ActionsOf(schedule, {PreForwardNoGrad(0), PreForwardNoGrad(1),
                                 PostForwardNoGrad(1), PostForwardNoGrad(0)}),
            "Gather(0) WaitGather(0) Gather(1) WaitGather(1) Free(1) Free(0)");
}

TEST(PartsTest, AreDroppedByResetAndRelease) {
  for (const Event& event : {Reset(), Release()}) {
    WatchedSchedule schedule(WithParts(1), NoPrefetch());
    Trace(schedule, Forward(1));
    EXPECT_EQ(ActionsOf(schedule, {event}), "Free(0) DropPart(1)");
  }
}

TEST(ReplicatedTest, AllReducesABackwardAfterTheReduceScatter) {
  WatchedSchedule schedule(Replicated(Layers(3)), NoPrefetch());
  Trace(schedule, Forward(3));
  EXPECT_EQ(Trace(schedule, Backward(3)), R"(
PreBackward(0):
PreBackward(3): Gather(3) WaitGather(3)
PostBackward(3): FillReduceBuffer(3) Free(3) Reduce(3)
PreBackward(2): Gather(2) WaitGather(2)
PostBackward(2): Replicate(3) FillReduceBuffer(2) Free(2) Reduce(2)
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): Replicate(2) WaitReduce(3) FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): Replicate(1) WaitReduce(2) FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: Replicate(0) WaitReduce(1) WaitReduce(0)
)");
}

// There is no reduce-scatter, so the network has work from the first gradient
// on.
TEST(ReplicatedTest, WhatIsNotShardedIsAllReducedFromItsGradientsOn) {
  WatchedSchedule schedule(NotSharded(3), NoPrefetch());
  EXPECT_EQ(ActionsOf(schedule, Forward(3)),
            "Gather(0) WaitGather(0) Gather(1) WaitGather(1) Gather(2) "
            "WaitGather(2) Gather(3) WaitGather(3)");
  EXPECT_EQ(Trace(schedule, Backward(3)), R"(
PreBackward(0):
PreBackward(3):
PostBackward(3): FillReduceBuffer(3) Free(3) Reduce(3) Replicate(3)
PreBackward(2):
PostBackward(2): FillReduceBuffer(2) Free(2) Reduce(2) Replicate(2)
PreBackward(1):
PostBackward(1): WaitReduce(3) FillReduceBuffer(1) Free(1) Reduce(1) Replicate(1)
PostBackward(0): WaitReduce(2) FillReduceBuffer(0) Free(0) Reduce(0) Replicate(0)
EndOfBackward: WaitReduce(1) WaitReduce(0)
)");
}

TEST(ReplicatedTest, WithOneBufferFinishesEachReductionBeforeTheNext) {
  ScheduleOptions options = NoPrefetch();
  options.max_reduce_buffers = 1;
  WatchedSchedule schedule(Replicated(Layers(1)), options);
  Trace(schedule, Forward(1));
  EXPECT_EQ(Trace(schedule, Backward(1)), R"(
PreBackward(0):
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): Replicate(1) WaitReduce(1) FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: Replicate(0) WaitReduce(0)
)");
}

TEST(UnshardTest, StartsAGatherThatTheNextForwardWaitsFor) {
  WatchedSchedule schedule(Layers(2), NoPrefetch());
  EXPECT_EQ(
      Trace(schedule, {Unshard(2), Unshard(0), PreForward(0), PreForward(1),
                       PostForward(1), PreForward(2), PostForward(2)}),
      R"(
Unshard(2): GatherCopy(2)
Unshard(0): GatherCopy(0)
PreForward(0): WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PostForward(1): Free(1)
PreForward(2): WaitGather(2)
PostForward(2): Free(2)
)");
}

TEST(UnshardTest, IsIdempotent) {
  WatchedSchedule schedule(Layers(1), NoPrefetch());
  EXPECT_EQ(Trace(schedule, {Unshard(1), Unshard(1), WaitUnshard(1),
                             WaitUnshard(1), Unshard(1)}),
            R"(
Unshard(1): GatherCopy(1)
Unshard(1):
WaitUnshard(1): WaitGather(1)
WaitUnshard(1):
Unshard(1):
)");
}

TEST(UnshardTest, WhatNoForwardHasUsedGoesAtTheEndOfBackward) {
  WatchedSchedule schedule(Layers(2), NoPrefetch());
  EXPECT_EQ(
      ActionsOf(schedule, {Unshard(2), PreForward(0), PreForward(1),
                           PostForward(1), PostForward(0)}),
      "GatherCopy(2) Gather(0) WaitGather(0) Gather(1) WaitGather(1) Free(1)");
  EXPECT_EQ(
      ActionsOf(schedule, {PreBackward(0), PreBackward(1), PostBackward(1),
                           PostBackward(0), EndOfBackward()}),
      "Gather(1) WaitGather(1) FillReduceBuffer(1) Free(1) Reduce(1) "
      "FillReduceBuffer(0) Free(0) Reduce(0) WaitGather(2) Free(2) "
      "WaitReduce(1) WaitReduce(0)");
}

TEST(UnshardTest, GathersTheValuesOfNowWhereAForwardHasKeptThoseOfThen) {
  WatchedSchedule schedule(ShardGradOp(1), NoPrefetch());
  Trace(schedule, Forward(1));
  EXPECT_EQ(Trace(schedule, {Unshard(1), WaitUnshard(1), Unshard(1),
                             PreForward(0), PreForward(1)}),
            R"(
Unshard(1): Free(1) GatherCopy(1)
WaitUnshard(1): WaitGather(1)
Unshard(1):
PreForward(0): Free(0) Gather(0) WaitGather(0)
PreForward(1):
)");
}

TEST(UnshardTest, TakesOverWhatWasGatheredOnAGuess) {
  WatchedSchedule schedule(Layers(2), {});
  Trace(schedule, Forward(2));
  Trace(schedule, Backward(2));
  // Unit 1 was a guess and is a request now: unit 2 does not free it.
  EXPECT_EQ(Trace(schedule, {PreForward(0), Unshard(1), PreForward(2)}), R"(
PreForward(0): Gather(0) WaitGather(0) Gather(1)
Unshard(1):
PreForward(2): Gather(2) WaitGather(2)
)");
}

TEST(ReshardTest, FreesAUnitAtOnce) {
  WatchedSchedule schedule(ShardGradOp(2), NoPrefetch());
  EXPECT_EQ(
      ActionsOf(schedule, {Unshard(1), Reshard(1), Reshard(1), Reshard(2)}),
      "GatherCopy(1) WaitGather(1) Free(1)");
  Trace(schedule, Forward(2));
  EXPECT_EQ(Trace(schedule, {Reshard(1), PreBackward(0), PreBackward(2),
                             PostBackward(2), PreBackward(1)}),
            R"(
Reshard(1): Free(1)
PreBackward(0):
PreBackward(2):
PostBackward(2): FillReduceBuffer(2) Free(2) Reduce(2)
PreBackward(1): Gather(1) WaitGather(1)
)");
}

TEST(ReshardTest, OfAUnitThatComputesIsRefused) {
  WatchedSchedule schedule(Layers(1), NoPrefetch());
  Trace(schedule, {PreForward(0), PreForward(1)});
  EXPECT_THAT(
      schedule.Next(Reshard(1)),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               HasSubstr("unit1 cannot be resharded while it computes")));
  EXPECT_EQ(ActionsOf(schedule, {PostForward(1), PostForward(0)}), "Free(1)");
  Trace(schedule, {PreBackward(0)});
  EXPECT_FALSE(schedule.Next(Reshard(0)).ok());
}

TEST(ReleaseTest, FreesEverythingBetweenSteps) {
  WatchedSchedule schedule(ShardOptimizer(1), {});
  Trace(schedule, Forward(1));
  Trace(schedule, UnsynchronizedBackward(1));
  EXPECT_EQ(ActionsOf(schedule, {Unshard(1), Release()}),
            "Free(1) GatherCopy(1) Free(0) WaitGather(1) Free(1)");
  EXPECT_EQ(ActionsOf(schedule, {Release()}), "");
}

TEST(ReleaseTest, InsideForwardAndBackwardIsRefused) {
  WatchedSchedule schedule(Layers(1), NoPrefetch());
  for (const Event& event : {PreForward(0), PreForward(1)}) {
    Trace(schedule, {event});
    EXPECT_THAT(
        schedule.Next(Release()),
        StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("root")));
  }
  Trace(schedule, {PostForward(1), PostForward(0)});
  EXPECT_THAT(schedule.Next(Release()), IsOk());
  Trace(schedule, {PreBackward(0)});
  EXPECT_FALSE(schedule.Next(Release()).ok());
  Trace(schedule, {EndOfBackward()});
  EXPECT_THAT(schedule.Next(Release()), IsOk());
}

}  // namespace
}  // namespace fsdp::testing
