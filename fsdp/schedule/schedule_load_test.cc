// When the schedule reads shards that rest elsewhere.
#include <string>
#include <vector>

#include "fsdp/schedule/schedule.h"
#include "fsdp/schedule/testing/schedule_trace.h"
#include "fsdp/schedule/testing/watched_schedule.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::testing::ActionsOf;
using ::fsdp::testing::Backward;
using ::fsdp::testing::Forward;
using ::fsdp::testing::Layers;
using ::fsdp::testing::Trace;
using ::fsdp::testing::WatchedSchedule;

// Returns units whose shards rest elsewhere, except for the root's.
std::vector<ScheduledUnit> AwayLayers(int layers) {
  std::vector<ScheduledUnit> units = Layers(layers);
  for (size_t i = 1; i < units.size(); ++i) units[i].rests_elsewhere = true;
  return units;
}

ScheduleOptions LoadsOnly(int distance) {
  ScheduleOptions options;
  options.forward_prefetch = false;
  options.backward_prefetch = false;
  options.load_distance = distance;
  return options;
}

TEST(LoadAheadTest, ReadsTheUnitsThatComeNext) {
  WatchedSchedule schedule(AwayLayers(3), LoadsOnly(2));
  Trace(schedule, Forward(3));
  Trace(schedule, Backward(3));
  EXPECT_EQ(Trace(schedule, Forward(3)), R"(
PreForward(0): Gather(0) WaitGather(0) Load(1) Load(2)
PreForward(1): Gather(1) WaitGather(1) Load(3)
PostForward(1): Free(1)
PreForward(2): Gather(2) WaitGather(2)
PostForward(2): Free(2)
PreForward(3): Gather(3) WaitGather(3)
PostForward(3): Free(3)
PostForward(0):
)");
  EXPECT_EQ(Trace(schedule, Backward(3)), R"(
PreBackward(0): Load(3) Load(2)
PreBackward(3): Gather(3) WaitGather(3) Load(1)
PostBackward(3): FillReduceBuffer(3) Free(3) Reduce(3)
PreBackward(2): Gather(2) WaitGather(2)
PostBackward(2): FillReduceBuffer(2) Free(2) Reduce(2)
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): WaitReduce(3) FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): WaitReduce(2) FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) WaitReduce(0)
)");
}

TEST(LoadAheadTest, KnowsNoOrderInTheFirstForward) {
  WatchedSchedule schedule(AwayLayers(2), LoadsOnly(2));
  EXPECT_EQ(ActionsOf(schedule, Forward(2)),
            "Gather(0) WaitGather(0) Gather(1) WaitGather(1) Free(1) "
            "Gather(2) WaitGather(2) Free(2)");
}

TEST(LoadAheadTest, ReadsNothingThatIsBeingGathered) {
  ScheduleOptions options = LoadsOnly(1);
  options.forward_prefetch = options.backward_prefetch = true;
  WatchedSchedule schedule(AwayLayers(3), options);
  Trace(schedule, Forward(3));
  Trace(schedule, Backward(3));
  const std::string actions = ActionsOf(schedule, Forward(3));
  EXPECT_EQ(actions.find("Load"), std::string::npos) << actions;
}

TEST(LoadAheadTest, OfADistanceOfZeroReadsNothing) {
  WatchedSchedule schedule(AwayLayers(3), LoadsOnly(0));
  Trace(schedule, Forward(3));
  Trace(schedule, Backward(3));
  const std::string actions = ActionsOf(schedule, Forward(3));
  EXPECT_EQ(actions.find("Load"), std::string::npos) << actions;
}

TEST(LoadAheadTest, ReadsOnlyWhatRestsElsewhere) {
  WatchedSchedule schedule(Layers(3), LoadsOnly(2));
  Trace(schedule, Forward(3));
  Trace(schedule, Backward(3));
  const std::string actions = ActionsOf(schedule, Forward(3));
  EXPECT_EQ(actions.find("Load"), std::string::npos) << actions;
}

}  // namespace
}  // namespace fsdp
