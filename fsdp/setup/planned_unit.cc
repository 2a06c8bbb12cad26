#include "fsdp/setup/planned_unit.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "comm/mesh.h"
#include "comm/quantized/quantized_communicator.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/layout.h"
#include "fsdp/options/options.h"
#include "fsdp/precision/mixed_precision.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/setup/module_tree.h"
#include "fsdp/setup/shard_plan.h"
#include "fsdp/setup/unit_plan.h"

namespace fsdp {

std::map<FlatKind, FlatParameters> FlatsOf(const ModuleTree& tree,
                                           const PlannedUnit& planned) {
  std::map<FlatKind, FlatParameters> by_kind;
  for (size_t i = 0; i < planned.unit.parameters.size(); ++i) {
    const OwnedParameter& owned = planned.unit.parameters[i];
    const std::vector<at::Tensor>& tensors = tree.parameters[owned.parameter];
    by_kind[{tensors.front().scalar_type(), planned.compute_dtypes[i],
             !tensors.front().requires_grad()}]
        .push_back({owned.names.front(), tensors});
  }
  return by_kind;
}

absl::StatusOr<flat_param::FlatLayout> LayoutOf(
    const FlatParameters& parameters, const FlatKind& kind, int ranks) {
  const bool narrows =
      c10::elementSize(kind.computed) < c10::elementSize(kind.stored);
  return flat_param::LayoutOf(parameters, narrows ? kind.computed : kind.stored,
                              ranks);
}

// Parameters that keep their dtype are reduced in it, too.
GradientDtypes GradientDtypesOf(const PlannedUnit& planned,
                                const FlatKind& kind) {
  const MixedPrecision& precision = planned.options.precision;
  const c10::ScalarType stored = kind.stored;
  const bool kept = kind.computed != precision.ParamDtype(stored);
  const c10::ScalarType reduced = kept && !precision.reduce_dtype.has_value()
                                      ? stored
                                      : precision.ReduceDtype(stored);
  return {reduced, precision.keep_low_precision_grads ? reduced : stored};
}

bool AnyTrainable(const FlatParameters& parameters) {
  return std::any_of(
      parameters.begin(), parameters.end(),
      [](const flat_param::NamedParameter& parameter) {
        return std::any_of(
            parameter.tensors.begin(), parameter.tensors.end(),
            [](const at::Tensor& tensor) { return tensor.requires_grad(); });
      });
}

namespace {

// Each piece begins on a cache line.
constexpr int64_t kAlignment = 64;

}  // namespace

int CommonFlats::Add(std::shared_ptr<comm::Communicator> group, int64_t bytes) {
  auto found = std::find_if(
      groups_.begin(), groups_.end(),
      [&](const Group& other) { return other.communicator == group; });
  if (found == groups_.end()) {
    groups_.emplace_back().communicator = std::move(group);
    found = std::prev(groups_.end());
  }
  ranges_.push_back(
      {static_cast<size_t>(found - groups_.begin()), found->bytes, bytes});
  found->bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return static_cast<int>(ranges_.size()) - 1;
}

absl::Status CommonFlats::Allocate() {
  for (Group& group : groups_) {
    if (group.communicator->world_size() == 1) continue;  // its shard is all
    if (!group.communicator->HasCommonMemory()) continue;
    FSDP_ASSIGN_OR_RETURN(group.common,
                          group.communicator->AllocateCommon(group.bytes));
  }
  return absl::OkStatus();
}

at::Tensor CommonFlats::Piece(int number) const {
  const Range& range = ranges_[number];
  const at::Tensor& memory = groups_[range.group].common.memory;
  if (!memory.defined()) return at::Tensor();
  return memory.narrow(0, range.begin, range.bytes);
}

std::vector<std::unique_ptr<comm::Fence>> CommonFlats::TakeFences() {
  std::vector<std::unique_ptr<comm::Fence>> fences;
  for (Group& group : groups_) {
    if (group.common.fence != nullptr) {
      fences.push_back(std::move(group.common.fence));
    }
  }
  return fences;
}

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

ScheduledUnit ScheduledUnitOf(const PlannedUnit& planned,
                              const Options& options) {
  const ShardingStrategy strategy = planned.options.strategy;
  ScheduledUnit scheduled;
  scheduled.name = DisplayName(planned.unit);
  scheduled.parent = planned.unit.parent;
  const bool is_root = planned.unit.parent < 0;
  scheduled.reshard_after_forward =
      (strategy == ShardingStrategy::kFullShard ||
       strategy == ShardingStrategy::kHybridShard) &&
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
