// Golden traces of steps, also of such that do not go as planned: changed
// orders, units that are left out, several forwards, recomputation, errors.
#include "fsdp/schedule/schedule.h"

#include <utility>

#include "base/testing/status_matchers.h"
#include "fsdp/schedule/testing/schedule_trace.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(ScheduleTest, FirstForwardGathersOnDemand) {
  WatchedSchedule schedule(Layers(3), {});
  EXPECT_TRUE(Answers(schedule, R"(
PreForward(0): Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PostForward(1): Free(1)
PreForward(2): Gather(2) WaitGather(2)
PostForward(2): Free(2)
PreForward(3): Gather(3) WaitGather(3)
PostForward(3): Free(3)
PostForward(0):
)"));
}

TEST(ScheduleTest, BackwardPrefetchesAndKeepsTwoReductionsInFlight) {
  WatchedSchedule schedule(Layers(3), {});
  Trace(schedule, Forward(3));
  EXPECT_TRUE(Answers(schedule, R"(
PreBackward(0): Gather(3)
PreBackward(3): WaitGather(3) Gather(2)
PostBackward(3): FillReduceBuffer(3) Free(3) Reduce(3)
PreBackward(2): WaitGather(2) Gather(1)
PostBackward(2): FillReduceBuffer(2) Free(2) Reduce(2)
PreBackward(1): WaitGather(1)
PostBackward(1): WaitReduce(3) FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): WaitReduce(2) FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) WaitReduce(0)
)"));
  EXPECT_TRUE(AllSharded(schedule, 4));
  EXPECT_EQ(schedule.num_reductions_in_flight(), 0);
}

TEST(ScheduleTest, SecondForwardPrefetchesByTheFirst) {
  WatchedSchedule schedule(Layers(3), {});
  Trace(schedule, Forward(3));
  Trace(schedule, Backward(3));
  EXPECT_TRUE(Answers(schedule, R"(
PreForward(0): Gather(0) WaitGather(0) Gather(1)
PreForward(1): WaitGather(1) Gather(2)
PostForward(1): Free(1)
PreForward(2): WaitGather(2) Gather(3)
PostForward(2): Free(2)
PreForward(3): WaitGather(3)
PostForward(3): Free(3)
PostForward(0):
)"));
}

// The units are an encoder (1) with layers (2, 3) in it, then a head (4).
TEST(ScheduleTest, NestedUnitsStayGatheredAroundTheirChildren) {
  WatchedSchedule schedule(UnitsWithParents({0, 1, 1, 0}), {});
  const Events forward = {PreForward(0),  PreForward(1), PreForward(2),
                          PostForward(2), PreForward(3), PostForward(3),
                          PostForward(1), PreForward(4), PostForward(4),
                          PostForward(0)};
  Trace(schedule, forward);
  EXPECT_TRUE(Answers(schedule, R"(
PreBackward(0): Gather(4)
PreBackward(4): WaitGather(4) Gather(1)
PostBackward(4): FillReduceBuffer(4) Free(4) Reduce(4)
PreBackward(1): WaitGather(1) Gather(3)
PreBackward(3): WaitGather(3) Gather(2)
PostBackward(3): FillReduceBuffer(3) Free(3) Reduce(3)
PreBackward(2): WaitGather(2)
PostBackward(2): WaitReduce(4) FillReduceBuffer(2) Free(2) Reduce(2)
PostBackward(1): WaitReduce(3) FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): WaitReduce(2) FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) WaitReduce(0)
)"));
}

TEST(ScheduleTest, UnitUsedTwiceIsGatheredAndReducedOncePerUse) {
  WatchedSchedule schedule(Layers(2), {});
  Trace(schedule,
        {PreForward(0), PreForward(1), PostForward(1), PreForward(2),
         PostForward(2), PreForward(1), PostForward(1), PostForward(0)});
  EXPECT_TRUE(Answers(schedule, R"(
PreBackward(0): Gather(1)
PreBackward(1): WaitGather(1) Gather(2)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PreBackward(2): WaitGather(2) Gather(1)
PostBackward(2): FillReduceBuffer(2) Free(2) Reduce(2)
PreBackward(1): WaitGather(1)
PostBackward(1): WaitReduce(1) FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): WaitReduce(2) FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) WaitReduce(0)
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

TEST(ScheduleRefusalTest, InnerUnitWithGradOutsideTheRootsForward) {
  WatchedSchedule schedule(Layers(2), {});
  Trace(schedule, Forward(2));
  EXPECT_THAT(schedule.Next(PreForward(2)),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("unit2"), HasSubstr("root"),
                             HasSubstr("NoGradGuard"))));
  // Nothing has changed: the kept root is gathered, and the order is known.
  EXPECT_FALSE(schedule.in_forward());
  EXPECT_TRUE(Answers(schedule, "\nPreBackward(0): Gather(2)\n"));
}

TEST(ScheduleRefusalTest, InnerUnitWithoutGradRunsOnItsOwn) {
  WatchedSchedule schedule(Layers(2), {});
  EXPECT_TRUE(Answers(schedule, R"(
NoGrad PreForward(2): Gather(2) WaitGather(2)
NoGrad PostForward(2): Free(2)
)"));
}

TEST(ScheduleRefusalTest, ForwardThatEndsWithoutBeingUnderWay) {
  WatchedSchedule schedule(Layers(2), {});
  EXPECT_THAT(schedule.Next(PostForward(0)),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("root"), HasSubstr("given up"))));
  Trace(schedule, {PreForward(0), PreForward(1)});
  EXPECT_THAT(
      schedule.Next(PostForward(0)),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("given up")));
  EXPECT_TRUE(Answers(schedule, "\nPostForward(1): Free(1)\n"));
}

TEST(ScheduleDeathTest, UnitsThatAreNoTreeStopTheProgram) {
  EXPECT_DEATH(WatchedSchedule({}, {}), "");
  EXPECT_DEATH(WatchedSchedule({{"root", -1}, {"other", -1}}, {}), "parent");
  EXPECT_DEATH(WatchedSchedule({{"root", -1}, {"a", 1}}, {}), "parent");
  EXPECT_DEATH(WatchedSchedule({{"root", -1}, {"a", 2}, {"b", 0}}, {}),
               "parent");
}

TEST(ScheduleDeathTest, NoReduceBufferStopsTheProgram) {
  ScheduleOptions options;
  options.max_reduce_buffers = 0;
  EXPECT_DEATH(WatchedSchedule(Layers(1), options), "max_reduce_buffers");
}

TEST(ScheduleDeathTest, EventsThatCannotComeStopTheProgram) {
  WatchedSchedule schedule(Layers(1), {});
  EXPECT_DEATH(schedule.Next(PreForward(2)).IgnoreError(), "unit");
  for (const Event& event : {PreForward(0), PreBackward(0)}) {
    Trace(schedule, {event});
    for (const char* between : {"Release", "SetReduction(1)"}) {
      EXPECT_DEATH(schedule.Next(EventOf(between)).IgnoreError(), "in_forward");
    }
    Trace(schedule, {Reset()});
  }
}

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
  EXPECT_TRUE(Answers(schedule, R"(
PreForward(0): Gather(0) WaitGather(0) Load(1) Load(2)
PreForward(1): Gather(1) WaitGather(1) Load(3)
PostForward(1): Free(1)
PreForward(2): Gather(2) WaitGather(2)
PostForward(2): Free(2)
PreForward(3): Gather(3) WaitGather(3)
PostForward(3): Free(3)
PostForward(0):
)"));
  EXPECT_TRUE(Answers(schedule, R"(
PreBackward(0): Load(3) Load(2)
PreBackward(3): Gather(3) WaitGather(3) Load(1)
PostBackward(3): FillReduceBuffer(3) Free(3) Reduce(3)
PreBackward(2): Gather(2) WaitGather(2)
PostBackward(2): FillReduceBuffer(2) Free(2) Reduce(2)
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): WaitReduce(3) FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): WaitReduce(2) FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) WaitReduce(0)
)"));
}

TEST(LoadAheadTest, ReadsNothingThatIsGatheredOrHereNorWithoutADistance) {
  ScheduleOptions prefetches = LoadsOnly(1);
  prefetches.forward_prefetch = prefetches.backward_prefetch = true;
  for (auto& [units, options] : {std::pair(AwayLayers(3), prefetches),
                                 std::pair(AwayLayers(3), LoadsOnly(0)),
                                 std::pair(Layers(3), LoadsOnly(2))}) {
    WatchedSchedule schedule(units, options);
    Trace(schedule, Forward(3));
    Trace(schedule, Backward(3));
    EXPECT_THAT(Trace(schedule, Forward(3)), Not(HasSubstr("Load")));
  }
}

}  // namespace
}  // namespace fsdp::testing
