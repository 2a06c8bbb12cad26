#include <cstdint>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "flat_param/layout.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/schedule/testing/choices.h"
#include "planner/simulator/simulator.h"

namespace fsdp::simulator {
namespace {

using ::fsdp::flat_param::FlatLayout;
using ::fsdp::testing::SeededChoices;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const int kWorldSizes[] = {1, 2, 3, 5, 8, 64, 1000, 4096, 16384};

// Time passes only for what a test turns on.
CostOptions Free() {
  CostOptions costs;
  costs.flops_per_second = costs.memory_bandwidth = kInfinity;
  costs.host.bandwidth = kInfinity;
  return costs;
}

CostOptions Network(double latency, double bandwidth) {
  CostOptions costs = Free();
  costs.host = {latency, bandwidth};
  return costs;
}

// Returns a root and `layers` units in it, of `elements` each, that compute
// `seconds` in forward and twice as long in backward.
ModelShape Chain(int layers, int64_t elements, double seconds) {
  ModelShape model;
  for (int i = 0; i <= layers; ++i) {
    UnitShape& unit = model.units.emplace_back();
    unit.name = i == 0 ? "root" : absl::StrCat("layers.", i - 1);
    unit.parent = i == 0 ? -1 : 0;
    unit.parameters = {Parameter("weight", {elements})};
    unit.forward.seconds = seconds;
    unit.backward.seconds = 2 * seconds;
  }
  return model;
}

StepResult Simulate(const ModelShape& model, const ShardingOptions& sharding,
                    const CostOptions& costs, const StepOptions& options = {}) {
  absl::StatusOr<StepResult> result =
      simulator::Simulate(Scenario{model, sharding, costs, options});
  EXPECT_OK(result);
  return *std::move(result);
}

StepOptions WithoutPrefetch() {
  StepOptions options;
  options.schedule.forward_prefetch = false;
  options.schedule.backward_prefetch = false;
  return options;
}

ShardingOptions Over(int ranks) {
  ShardingOptions options;
  options.ranks = ranks;
  return options;
}

TEST(StepBytesTest, TheRootIsGatheredOnceUnlessItIsResharded) {
  const ModelShape model = Chain(4, 1024, 0);
  ShardingOptions sharding = Over(4);
  const int64_t unit = int64_t{1024} * 4 / 4 * 3;
  EXPECT_EQ(Simulate(model, sharding, Free()).total.gathered_bytes, 9 * unit);
  sharding.reshard_root = true;
  EXPECT_EQ(Simulate(model, sharding, Free()).total.gathered_bytes, 10 * unit);
}

// Each unit's segment goes in pieces there and back.
TEST(StepBytesTest, CopiesOfAModelAreAllReduced) {
  const ModelShape model = Chain(4, 4096, 0);
  ShardingOptions sharding = Over(8);
  sharding.strategy = Strategy::kReplicated;
  const Spent whole = Simulate(model, sharding, Free()).total;
  EXPECT_EQ(whole.gathered_bytes + whole.reduced_bytes, 0);
  EXPECT_EQ(whole.replicated_bytes, 2 * 7 * 5 * (4096 * 4 + 16) / 8);
  sharding = Over(6);
  sharding.shard_ranks = 2;
  const Spent hybrid = Simulate(model, sharding, Free()).total;
  EXPECT_EQ(hybrid.replicated_bytes, 2 * 2 * 5 * (2048 * 4 + 16) / 3);
}

TEST(StepBytesTest, AGroupForBackwardGathersAmongItself) {
  const ModelShape model = Chain(4, 4096, 0);
  ShardingOptions sharding = Over(64);
  sharding.backward_group_size = 8;
  const Spent total = Simulate(model, sharding, Free()).total;
  // The root is gathered once.
  EXPECT_EQ(total.gathered_bytes,
            5 * (4096 * 4 / 64 * 63) + 4 * (4096 * 4 / 8 * 7));
}

TEST(StepBytesTest, AccumulatingGathersEachTimeAndReducesOnce) {
  const ModelShape model = Chain(4, 4096, 0);
  StepOptions options;
  options.memory.backwards_per_step = 3;
  const Spent once = Simulate(model, Over(8), Free()).total;
  const Spent thrice = Simulate(model, Over(8), Free(), options).total;
  EXPECT_EQ(thrice.gathered_bytes, 3 * once.gathered_bytes);
  EXPECT_EQ(thrice.reduced_bytes, once.reduced_bytes);
  ShardingOptions sharding = Over(8);
  sharding.strategy = Strategy::kOptimizer;
  const Spent kept = Simulate(model, sharding, Free(), options).total;
  EXPECT_EQ(kept.gathered_bytes, 5 * 4096 * 4 / 8 * 7);
}

TEST(StepTimeTest, WithAFreeNetworkItIsTheCompute) {
  for (const int ranks : kWorldSizes) {
    for (const bool overlap : {true, false}) {
      CostOptions costs = Free();
      costs.overlap = overlap;
      const StepResult step = Simulate(Chain(7, 1000, 0.5), Over(ranks), costs);
      EXPECT_EQ(step.seconds, 8 * 1.5);
      EXPECT_EQ(step.total.compute, step.seconds);
      EXPECT_EQ(step.total.exposed(), 0);
    }
  }
}

TEST(StepTimeTest, WithoutComputeItIsGathersAndReductions) {
  for (const int ranks : {1, 2, 4, 8, 64, 16384}) {
    for (const bool overlap : {true, false}) {
      CostOptions costs = Network(0.5, 1024);
      costs.overlap = overlap;
      const StepResult step =
          Simulate(Chain(7, 1 << 16, 0), Over(ranks), costs);
      const double piece = double{1 << 18} / ranks;
      const double flags = FlatLayout::kAlignmentBytes;
      // There are 2n - 1 gathers and n reductions.
      const double gathers = (ranks - 1) * 15 * (0.5 + piece / 1024);
      const double reductions =
          (ranks - 1) * 8 * (0.5 + (piece + flags) / 1024);
      EXPECT_NEAR(step.seconds, gathers + reductions, 1e-9 * step.seconds);
      EXPECT_NEAR(step.seconds, step.total.exposed(), 1e-9 * step.seconds);
    }
  }
}

// Gathers and reductions take 1 s, forwards 2 s, backwards 4 s; 3 units.
TEST(StepTimeTest, OverlapsWhatIsPrefetched) {
  const ModelShape model = Chain(3, int64_t{4} * 16, 2);
  CostOptions costs = Network(1, kInfinity);
  const StepResult step = Simulate(model, Over(2), costs);
  // The gathers of the root and, behind it, of the first layer are waited for;
  // so are the reductions of that layer, the last in backward, and of the root.
  EXPECT_DOUBLE_EQ(step.total.exposed_gather, 1 + 1);
  EXPECT_DOUBLE_EQ(step.total.exposed_reduce, 1 + 1);
  EXPECT_DOUBLE_EQ(step.seconds, 4 * 6 + 4);
  const StepResult without = Simulate(model, Over(2), costs, WithoutPrefetch());
  // The root's gather and each layer's two; two of them come behind a
  // reduction.
  EXPECT_DOUBLE_EQ(without.total.exposed_gather, 1 + 3 * 2 + 2);
  costs.overlap = false;
  const StepResult blocking = Simulate(model, Over(2), costs);
  EXPECT_DOUBLE_EQ(blocking.seconds, 4 * 6 + 7 + 4);
}

TEST(StepTimeTest, PartsAddUp) {
  for (uint32_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    SeededChoices choices(seed);
    ModelShape model = Chain(choices.Between(0, 9), 100, 0);
    for (UnitShape& unit : model.units) {
      unit.parameters = {Parameter("weight", {choices.Between(0, 100000)})};
      unit.forward.seconds = 1e-3 * choices.Between(0, 9);
      unit.backward.seconds = 1e-3 * choices.Between(0, 9);
      unit.share_before = 0.1 * choices.Between(0, 10);
      if (choices.Chance(20)) unit.parameters.clear();
    }
    CostOptions costs = Network(1e-3 * choices.Between(0, 2), 1e7);
    costs.memory_bandwidth = 1e9;
    costs.overlap = choices.Chance(70);
    ShardingOptions sharding = Over(4);
    if (choices.Chance(50)) sharding.shard_ranks = 2;
    if (choices.Chance(50)) sharding.compute_bytes = 2;
    StepOptions options;
    options.memory.backwards_per_step = choices.Between(1, 3);
    options.schedule.step_in_backward = choices.Chance(30);
    const StepResult step = Simulate(model, sharding, costs, options);
    const Spent& total = step.total;
    EXPECT_NEAR(
        step.seconds,
        total.compute + total.copies + total.optimizer + total.exposed(), 1e-9);
  }
}

TEST(StepTimeTest, CopiesAndTheOptimizerReadAndWriteMemory) {
  CostOptions costs = Free();
  costs.memory_bandwidth = 1;
  const ModelShape model = Chain(0, 1024, 0);
  StepResult step = Simulate(model, Over(2), costs);
  // Gradients go into the buffer with its flags, half of that into the shard's.
  EXPECT_EQ(step.total.copies, 4096 + (4096 + 32) + (2048 + 16) + 2048);
  // Parameters and two states are read and written, gradients read.
  EXPECT_EQ(step.total.optimizer, 7 * 2048);
  ShardingOptions sharding = Over(2);
  sharding.compute_bytes = 2;
  step = Simulate(model, sharding, costs);
  EXPECT_EQ(step.total.copies,
            2048 + 1024 + 2048 + (4096 + 32) + (2048 + 16) + 2048);
}

TEST(StepTimeTest, InPlaceInSharedMemoryOnlyFencesAreLeft) {
  CostOptions options = Network(1, 1);
  options.shared_memory = true;
  options.overlap = false;
  options.fence_seconds = 0.25;
  ASSERT_OK_AND_ASSIGN(const CostModel costs, CostModel::Create(options, 4));
  ASSERT_OK_AND_ASSIGN(ShardedShape sharded, Shard(Chain(3, 4096, 1), Over(4)));
  for (ScheduledUnit& unit : sharded.units) unit.shares_memory = true;
  ASSERT_OK_AND_ASSIGN(const StepResult step, SimulateStep(sharded, costs, {}));
  EXPECT_EQ(step.total.bytes(), 0);
  // Fences come before a forward and after it; the reductions tell when
  // backward has ended.
  EXPECT_DOUBLE_EQ(step.total.exposed_gather, 2 * 0.25);
  EXPECT_DOUBLE_EQ(step.total.exposed_reduce, 4 * 0.25);
  EXPECT_DOUBLE_EQ(step.seconds, 4 * 3 + 6 * 0.25);
}

TEST(SimulateStepTest, RefusesNumbersWithoutMeaning) {
  const ModelShape model = Chain(1, 1, 1);
  ASSERT_OK_AND_ASSIGN(const ShardedShape sharded, Shard(model, Over(2)));
  ASSERT_OK_AND_ASSIGN(const CostModel costs, CostModel::Create(Free(), 2));
  const auto refusal = [&](void (*change)(StepOptions&)) {
    StepOptions options;
    change(options);
    return SimulateStep(sharded, costs, options).status();
  };
  EXPECT_OK(refusal([](StepOptions&) {}));
  const auto is_refused = StatusIs(absl::StatusCode::kInvalidArgument,
                                   HasSubstr("at least 1, the others"));
  EXPECT_THAT(refusal([](StepOptions& o) { o.memory.backwards_per_step = 0; }),
              is_refused);
  EXPECT_THAT(
      refusal([](StepOptions& o) { o.schedule.max_reduce_buffers = 0; }),
      is_refused);
  EXPECT_THAT(
      refusal([](StepOptions& o) { o.schedule.max_gathered_units = -1; }),
      is_refused);
  EXPECT_THAT(refusal([](StepOptions& o) { o.memory.optimizer_state = -1; }),
              is_refused);
  EXPECT_THAT(refusal([](StepOptions& o) { o.memory.optimizer_state = 1e30; }),
              is_refused);
}

}  // namespace
}  // namespace fsdp::simulator
