#include "fsdp/setup/placements.h"

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "comm/mesh.h"
#include "comm/quantized/quantized_communicator.h"
#include "fsdp/options/options.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/setup/shard_plan.h"
#include "fsdp/setup/unit_plan.h"

namespace fsdp {

absl::StatusOr<Placement> Placements::Of(const UnitOptions& options) {
  Placement placement;
  Group replicate;
  switch (options.strategy) {
    case ShardingStrategy::kFullShard:
    case ShardingStrategy::kShardGradOp:
    case ShardingStrategy::kShardOptimizer:
      placement.shard = mesh_.world();
      break;
    case ShardingStrategy::kNoShard: {
      FSDP_ASSIGN_OR_RETURN(placement.shard, Split(mesh_.world(), 1));
      replicate = mesh_.world();
      break;
    }
    case ShardingStrategy::kHybridShard:
    case ShardingStrategy::kHybridShardGradOp:
      placement.shard = mesh_.group(1);
      replicate = mesh_.group(0);
      break;
  }
  if (replicate != nullptr && replicate->world_size() > 1) {
    placement.replicate = replicate;
  }
  const int part = options.backward_group_size.value_or(0);
  if (part > 0 && part < placement.shard->world_size()) {
    FSDP_ASSIGN_OR_RETURN(placement.part, Split(placement.shard, part));
  }
  return placement;
}

bool Placements::QuantizesGathers(const Placement& placement) const {
  return quantization_.gather && placement.shard->world_size() > 1;
}

absl::Status Placements::Quantize(int64_t exact_tail, Placement& placement) {
  if (!quantization_.any() || placement.shard->world_size() == 1) {
    return absl::OkStatus();
  }
  if (quantization_.reduce && !placement.shard->HasAllToAll()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Options::quantize.reduce: ", placement.shard->ToString(),
        " has no all-to-all, which such sums are made of: reduce exactly, or "
        "train over another backend"));
  }
  placement.quantization = quantization_.ForGroup(exact_tail);
  Group& result = quantized_[{placement.shard.get(), exact_tail}];
  if (result == nullptr) {
    FSDP_ASSIGN_OR_RETURN(result, comm::CreateQuantizedCommunicator(
                                      placement.shard, placement.quantization));
  }
  placement.quantized = result;
  return absl::OkStatus();
}

absl::StatusOr<Placements::Group> Placements::Split(const Group& group,
                                                    int size) {
  Group& result = split_[{group.get(), size}];
  if (result == nullptr) {
    FSDP_ASSIGN_OR_RETURN(result, comm::SplitConsecutive(group, size));
  }
  return result;
}

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
