#include "fsdp/setup/scheduled_units.h"

#include "fsdp/options/options.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/setup/shard_plan.h"
#include "fsdp/setup/unit_plan.h"

namespace fsdp {
namespace {

bool IsKeptAfterForward(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::kShardGradOp ||
         strategy == ShardingStrategy::kShardOptimizer ||
         strategy == ShardingStrategy::kNoShard ||
         strategy == ShardingStrategy::kHybridShardGradOp;
}

}  // namespace

ScheduledUnit ScheduledUnitOf(const PlannedUnit& planned,
                              const Options& options) {
  const ShardingStrategy strategy = planned.options.strategy;
  ScheduledUnit scheduled;
  scheduled.name = DisplayName(planned.unit);
  scheduled.parent = planned.unit.parent;
  const bool is_root = planned.unit.parent < 0;
  scheduled.reshard_after_forward =
      !IsKeptAfterForward(strategy) &&
      (!is_root || options.reshard_root_after_forward);
  scheduled.keep_until_sync = strategy == ShardingStrategy::kShardOptimizer ||
                              strategy == ShardingStrategy::kNoShard;
  return scheduled;
}

ScheduleOptions ScheduleOptionsOf(const Options& options) {
  ScheduleOptions scheduled;
  scheduled.forward_prefetch = options.prefetch.forward;
  scheduled.backward_prefetch = options.prefetch.backward;
  scheduled.load_distance = options.offload.prefetch_distance;
  return scheduled;
}

}  // namespace fsdp
