// When ranks that compute with each other's shards may read and write them.
#include <vector>

#include "fsdp/schedule/schedule.h"
#include "fsdp/schedule/testing/schedule_trace.h"
#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

using Units = std::vector<ScheduledUnit>;

Units SharingLayers(int layers) {
  Units units = Layers(layers);
  for (ScheduledUnit& unit : units) unit.shares_memory = true;
  return units;
}

TEST(SharingTest, AStepOpensShardsAndClosesThemOnce) {
  WatchedSchedule schedule(SharingLayers(1), NoPrefetch());
  for (int iteration = 0; iteration < 2; ++iteration) {
    EXPECT_EQ(Trace(schedule, Forward(1)), R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PostForward(1): Free(1)
PostForward(0): CloseShards(0)
)");
    EXPECT_EQ(Trace(schedule, Backward(1)), R"(
PreBackward(0):
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) WaitReduce(0)
)");
  }
}

// No reduction shows that the other ranks have finished reading.
TEST(SharingTest, ABackwardThatReadsWhatItDoesNotReduceClosesShards) {
  WatchedSchedule schedule(SharingLayers(1), NoPrefetch());
  Trace(schedule, Forward(1));
  EXPECT_EQ(ActionsOf(schedule, UnsynchronizedBackward(1)),
            "Gather(1) WaitGather(1) Accumulate(1) Free(1) Accumulate(0) "
            "Free(0) CloseShards(0)");
  Trace(schedule, Forward(1));
  EXPECT_EQ(
      Trace(schedule, {PreBackward(0), PreBackward(1), PostBackwardFrozen(1),
                       PostBackward(0), EndOfBackward()}),
      R"(
PreBackward(0):
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): Free(1)
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: FillReduceBuffer(1) Reduce(1) WaitReduce(0) WaitReduce(1) CloseShards(0)
)");
  // The unit is recomputed once more after its reduction.
  Trace(schedule, Forward(1));
  Trace(schedule, {PreBackward(0), PreBackward(1), PostBackward(1)});
  EXPECT_EQ(
      ActionsOf(schedule,
                {Recomputes(PreForward(1)), Recomputes(PostForwardNoGrad(1)),
                 PostBackward(0), EndOfBackward()}),
      "Gather(1) WaitGather(1) Free(1) FillReduceBuffer(0) Free(0) Reduce(0) "
      "WaitReduce(1) WaitReduce(0) CloseShards(0)");
}

TEST(SharingTest, NoUnitStepsWhileOthersMayReadIt) {
  ScheduleOptions options = NoPrefetch();
  options.step_in_backward = true;
  options.max_reduce_buffers = 1;
  WatchedSchedule schedule(SharingLayers(2), options);
  Trace(schedule, Forward(2));
  Trace(schedule, {PreBackward(0), PreBackward(2), PostBackward(2)});
  // Unit 2 is recomputed for another unit before its reduction is over.
  EXPECT_EQ(
      Trace(schedule, {Recomputes(PreForward(2)),
                       Recomputes(PostForwardNoGrad(2)), PreBackward(1),
                       PostBackward(1), PostBackward(0), EndOfBackward()}),
      R"(
PreForward(2): Gather(2) WaitGather(2)
PostForward(2): Free(2)
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): WaitReduce(2) FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): WaitReduce(1) Step(1) FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(0) Step(0) CloseShards(0) Step(2)
)");
}

// The user's values are copies: they neither wait for other ranks' shards nor
// keep a forward from waiting.
TEST(SharingTest, EveryForwardOpensShardsWhateverTheUserHasUnsharded) {
  WatchedSchedule schedule(SharingLayers(2), NoPrefetch());
  EXPECT_EQ(Trace(schedule, {Unshard(1), WaitUnshard(1), Unshard(2), Reshard(2),
                             PreForward(0), PreForward(1), PostForward(1),
                             PostForward(0), Unshard(2), Release(), Release()}),
            R"(
Unshard(1): GatherCopy(1)
WaitUnshard(1): WaitGather(1)
Unshard(2): GatherCopy(2)
Reshard(2): WaitGather(2) Free(2)
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
PreForward(1):
PostForward(1): Free(1)
PostForward(0): CloseShards(0)
Unshard(2): GatherCopy(2)
Release: Free(0) WaitGather(2) Free(2)
Release:
)");
  WatchedSchedule all(SharingLayers(1), NoPrefetch());
  EXPECT_EQ(ActionsOf(all, {Unshard(0), Unshard(1), PreForwardNoGrad(0),
                            PreForwardNoGrad(1), PostForwardNoGrad(1),
                            PostForwardNoGrad(0)}),
            "GatherCopy(0) GatherCopy(1) OpenShards(0) WaitGather(0) "
            "WaitGather(1) Free(1) Free(0) CloseShards(0)");
}

TEST(SharingTest, WhatIsKeptForBackwardIsGatheredApartForTheUser) {
  WatchedSchedule schedule(SharingLayers(1), NoPrefetch());
  Trace(schedule, Forward(1));
  EXPECT_EQ(Trace(schedule, {Unshard(0), Unshard(0), WaitUnshard(0),
                             PreBackward(0), PostBackward(0), EndOfBackward()}),
            R"(
Unshard(0): Free(0) GatherCopy(0)
Unshard(0):
WaitUnshard(0): WaitGather(0)
PreBackward(0):
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(0)
)");
  // The same holds after a forward has used an earlier request.
  Trace(schedule, {Unshard(0)});
  Trace(schedule, Forward(1));
  EXPECT_EQ(ActionsOf(schedule, {Unshard(0)}), "Free(0) GatherCopy(0)");
}

TEST(SharingTest, ARequestInsideAForwardEndsWithIt) {
  WatchedSchedule schedule(SharingLayers(2), NoPrefetch());
  EXPECT_EQ(Trace(schedule, {PreForward(0), Unshard(1), Unshard(2),
                             PreForward(1), PostForward(1), PostForward(0)}),
            R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
Unshard(1): Gather(1)
Unshard(2): Gather(2)
PreForward(1): WaitGather(1)
PostForward(1): Free(1)
PostForward(0): WaitGather(2) Free(2) CloseShards(0)
)");
}

TEST(SharingTest, WaitingForWhatNobodyAskedForIsALookAtTheValuesOfThen) {
  WatchedSchedule schedule(SharingLayers(1), NoPrefetch());
  EXPECT_EQ(Trace(schedule, {WaitUnshard(1), PreForward(0)}), R"(
WaitUnshard(1): GatherCopy(1) WaitGather(1)
PreForward(0): Free(1) OpenShards(0) Gather(0) WaitGather(0)
)");
}

// Gathering anew moves nothing, and shards may have been written.
TEST(SharingTest, NothingIsKeptOverBackwardsThatDoNotSynchronize) {
  Units units = SharingLayers(1);
  for (ScheduledUnit& unit : units) {
    unit.reshard_after_forward = false;
    unit.keep_until_sync = true;
  }
  WatchedSchedule schedule(units, NoPrefetch());
  Trace(schedule, Forward(1));
  Trace(schedule, UnsynchronizedBackward(1));
  EXPECT_EQ(ActionsOf(schedule, {PreForward(0), PreForward(1)}),
            "OpenShards(0) Gather(0) WaitGather(0) Gather(1) WaitGather(1)");
}

TEST(SharingTest, AForwardAfterOneThatWasGivenUpOpensShardsAgain) {
  WatchedSchedule schedule(SharingLayers(1), NoPrefetch());
  Trace(schedule, {PreForward(0), PreForward(1), Reset()});
  EXPECT_EQ(ActionsOf(schedule, Forward(1)),
            "OpenShards(0) Gather(0) WaitGather(0) Gather(1) WaitGather(1) "
            "Free(1) CloseShards(0)");
  Trace(schedule, {PreBackward(0), PreBackward(1), Reset()});
  EXPECT_EQ(ActionsOf(schedule, {PreForward(0)}),
            "OpenShards(0) Gather(0) WaitGather(0)");
}

}  // namespace
}  // namespace fsdp::testing
