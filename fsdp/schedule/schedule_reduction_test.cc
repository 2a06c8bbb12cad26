// Units whose gradients are reduced in part: they are kept whole, or as sums of
// the group of shards.
#include <vector>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/schedule/testing/schedule_trace.h"
#include "fsdp/schedule/testing/watched_schedule.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::testing::Backward;
using ::fsdp::testing::EndOfBackward;
using ::fsdp::testing::Events;
using ::fsdp::testing::Forward;
using ::fsdp::testing::Layers;
using ::fsdp::testing::NoPrefetch;
using ::fsdp::testing::PostBackward;
using ::fsdp::testing::PostForward;
using ::fsdp::testing::PreBackward;
using ::fsdp::testing::PreForward;
using ::fsdp::testing::Reset;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Trace;
using ::fsdp::testing::WatchedSchedule;
using ::testing::HasSubstr;

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
}  // namespace fsdp
