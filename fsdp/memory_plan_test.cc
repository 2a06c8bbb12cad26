#include "fsdp/memory_plan.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "fsdp/schedule.h"
#include "fsdp/testing/schedule_trace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::testing::Layers;
using ::fsdp::testing::NoPrefetch;
using ::testing::HasSubstr;

// A root of 100 bytes and layers of 1000, over 4 ranks.
std::vector<UnitBytes> BytesOf(int layers) {
  std::vector<UnitBytes> bytes;
  for (int i = 0; i <= layers; ++i) {
    UnitBytes& unit = bytes.emplace_back();
    unit.unsharded = i == 0 ? 100 : 1000;
    unit.shard = unit.gradient = unit.unsharded / 4;
    unit.reduce_buffer = unit.unsharded + 8;
  }
  return bytes;
}

TEST(MemoryPlanTest, HoldsTheRootAndTwoUnitsAndTwoReduceBuffers) {
  const MemoryPlan plan = PlanMemory(Layers(6), BytesOf(6), {});
  EXPECT_EQ(plan.shards, 6 * 250 + 25);
  EXPECT_EQ(plan.gradients, 6 * 250 + 25);
  EXPECT_EQ(plan.optimizer, 2 * (6 * 250 + 25));
  EXPECT_EQ(plan.gathered, 100 + 2 * 1000);
  EXPECT_EQ(plan.in_flight, 2 * 1008);
  EXPECT_EQ(plan.parts, 0);
  EXPECT_EQ(plan.total(), plan.shards + plan.gradients + plan.optimizer +
                              plan.gathered + plan.in_flight);
}

TEST(MemoryPlanTest, WithoutPrefetchOneUnitIsEnough) {
  const MemoryPlan plan = PlanMemory(Layers(6), BytesOf(6), NoPrefetch());
  EXPECT_EQ(plan.gathered, 100 + 1000);
}

TEST(MemoryPlanTest, UnitsKeptAfterForwardAddUp) {
  std::vector<ScheduledUnit> units = Layers(6);
  for (ScheduledUnit& unit : units) unit.reshard_after_forward = false;
  EXPECT_EQ(PlanMemory(units, BytesOf(6), {}).gathered, 100 + 6 * 1000);
}

TEST(MemoryPlanTest, PartsForASmallerGroupAreCounted) {
  std::vector<ScheduledUnit> units = Layers(3);
  std::vector<UnitBytes> bytes = BytesOf(3);
  for (int i = 1; i <= 3; ++i) {
    units[i].keeps_part = true;
    bytes[i].part = 500;
  }
  EXPECT_EQ(PlanMemory(units, bytes, {}).parts, 3 * 500);
}

TEST(MemoryPlanTest, GradientsKeptWholeOverBackwardsAreInFlightTogether) {
  MemoryPlanOptions options;
  options.backwards_per_step = 3;
  EXPECT_EQ(PlanMemory(Layers(4), BytesOf(4), {}, options).in_flight,
            4 * 1008 + 108);
}

TEST(MemoryPlanTest, FrozenUnitsHaveNeitherGradientsNorState) {
  std::vector<UnitBytes> bytes = BytesOf(2);
  for (UnitBytes& unit : bytes) unit.trainable = false;
  const MemoryPlan plan = PlanMemory(Layers(2), bytes, {});
  EXPECT_EQ(plan.gradients, 0);
  EXPECT_EQ(plan.optimizer, 0);
  EXPECT_EQ(plan.in_flight, 0);
}

TEST(MemoryPlanTest, SteppingInBackwardNeedsTheGradientsOfOneUnit) {
  ScheduleOptions options;
  options.step_in_backward = true;
  EXPECT_EQ(PlanMemory(Layers(5), BytesOf(5), options).gradients, 250);
}

TEST(MemoryPlanTest, NestedUnitsAreGatheredTogether) {
  const std::vector<ScheduledUnit> units =
      fsdp::testing::UnitsWithParents({0, 1, 2, 3});
  EXPECT_EQ(PlanMemory(units, BytesOf(4), {}).gathered, 100 + 4 * 1000);
}

TEST(MemoryPlanTest, PrintsALineForEachKind) {
  const std::string text = PlanMemory(Layers(1), BytesOf(1), {}).ToString();
  for (const char* kind : {"shards", "gradients", "optimizer", "gathered",
                           "reduce buffers", "total"}) {
    EXPECT_THAT(text, HasSubstr(kind));
  }
}

}  // namespace
}  // namespace fsdp
