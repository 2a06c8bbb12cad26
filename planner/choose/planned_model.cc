#include "planner/choose/planned_model.h"

#include <c10/core/ScalarType.h>

#include <utility>

#include "base/status_macros.h"
#include "comm/communicator.h"
#include "fsdp/setup/unit_plan.h"

namespace fsdp {
namespace {

int64_t SizeOf(c10::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

struct Groups {
  simulator::Group shard;
  simulator::Group replicate;
  int part = 0;  // ranks that gather for backward; 0: the shard group
  bool shares_memory = false;
};

Groups GroupsOf(const UnitOptions& unit, const comm::Mesh& mesh,
                const Options& options) {
  const int world = mesh.world()->world_size();
  Groups groups;
  const comm::Communicator* shard = mesh.world().get();
  switch (unit.strategy) {
    case ShardingStrategy::kFullShard:
    case ShardingStrategy::kShardGradOp:
    case ShardingStrategy::kShardOptimizer:
      groups.shard.size = world;
      break;
    case ShardingStrategy::kNoShard:
      groups.replicate.size = world;
      break;
    case ShardingStrategy::kHybridShard:
    case ShardingStrategy::kHybridShardGradOp:
      shard = mesh.group(1).get();
      groups.shard.size = shard->world_size();
      groups.replicate = {world / groups.shard.size, groups.shard.size};
      break;
  }
  const int part = unit.backward_group_size.value_or(0);
  if (part < groups.shard.size) groups.part = part;
  groups.shares_memory =
      options.share_memory && groups.shard.size > 1 && shard->HasCommonMemory();
  return groups;
}

// Plans units in the order in which ShardUnits() makes them, and counts their
// bytes as Describe() does.
class Planner {
 public:
  Planner(const ShardPlan& plan, const comm::Mesh& mesh, const Options& options)
      : plan_(plan), mesh_(mesh), options_(options) {}

  absl::StatusOr<PlannedModel> Plan() {
    for (const PlannedUnit& planned : plan_.units) {
      groups_.push_back(GroupsOf(planned.options, mesh_, options_));
      FSDP_ASSIGN_OR_RETURN(
          flats_.emplace_back(),
          PlanFlats(plan_.tree, planned, groups_.back().shard.size));
    }
    FSDP_RETURN_IF_ERROR(PlanResting());
    result_.schedule = ScheduleOptionsOf(options_);
    result_.gradients.resize(plan_.tree.nodes.size());
    first_users_.assign(plan_.tree.parameters.size(), -1);
    for (const ParameterUse& use : plan_.tree.uses) {
      int& first = first_users_[use.parameter];
      if (first < 0) first = use.module;
    }
    simulator::ShardedShape& shape = result_.shape;
    const Groups& groups = groups_.front();
    shape.ranks = mesh_.world()->world_size();
    shape.shard = groups.shard;
    shape.replicate = groups.replicate;
    shape.part.size = groups.part;
    for (const auto& flats : flats_) {
      for (const PlannedFlat& flat : flats) {
        shape.casts |= flat.stored != flat.computed;
      }
    }
    for (size_t i = 0; i < plan_.units.size(); ++i) AddUnit(i);
    return std::move(result_);
  }

 private:
  absl::Status PlanResting() {
    if (!options_.offload.any()) return absl::OkStatus();
    FSDP_ASSIGN_OR_RETURN(
        result_.offload,
        PlanOffload(RestingFlatsOf(plan_, flats_, options_.offload),
                    options_.offload,
                    plan_.tree.parameters.front().front().is_cpu()));
    return absl::OkStatus();
  }

  // Counts the gradients of the parameters of a unit that are trained.
  void CountGradients(const PlannedUnit& planned) {
    for (size_t i = 0; i < planned.unit.parameters.size(); ++i) {
      const int parameter = planned.unit.parameters[i].parameter;
      const at::Tensor& tensor = plan_.tree.parameters[parameter].front();
      if (!tensor.requires_grad()) continue;
      result_.gradients[first_users_[parameter]] +=
          tensor.numel() * SizeOf(planned.compute_dtypes[i]);
    }
  }

  bool RestsElsewhere(int flat, RestingKind kind) const {
    return result_.offload.has_value() &&
           result_.offload->tier(flat, kind) != Tier::kDevice;
  }

  void AddUnit(size_t index) {
    const Groups& groups = groups_[index];
    UnitBytes& bytes = result_.shape.bytes.emplace_back();
    result_.shape.messages.emplace_back();
    bytes.trainable = false;
    bytes.takes_gradients = true;
    bool is_shared = false;
    for (const PlannedFlat& flat : flats_[index]) {
      is_shared |= groups.shares_memory &&
                   !RestsElsewhere(next_flat_, RestingKind::kParameters);
      AddParameters(flat, groups, bytes);
      if (flat.trainable) AddGradients(flat, groups, bytes);
      ++next_flat_;
    }
    bytes.ranks = groups.shard.size;
    if (!bytes.takes_gradients) CountGradients(plan_.units[index]);
    ScheduledUnit& unit = result_.shape.units.emplace_back(
        ScheduledUnitOf(plan_.units[index], options_));
    unit.shares_memory = is_shared;
    unit.rests_elsewhere = bytes.away > 0;
    unit.keeps_part = groups.part > 0 && !is_shared;
    unit.replicated = groups.replicate.size > 1;
    unit.sharded = groups.shard.size > 1;
  }

  void AddParameters(const PlannedFlat& flat, const Groups& groups,
                     UnitBytes& bytes) {
    const bool away = RestsElsewhere(next_flat_, RestingKind::kParameters);
    const bool casts = flat.stored != flat.computed;
    (away ? bytes.away : bytes.shard) += flat.shard_bytes();
    if (!flat.trainable ||
        RestsElsewhere(next_flat_, RestingKind::kOptimizer)) {
      bytes.stateless += flat.shard_bytes();
    }
    result_.shape.messages.back().gather += flat.whole_bytes();
    if (groups.shares_memory && !away) {
      if (casts) bytes.copy += flat.whole_bytes() / groups.shard.size;
    } else if (groups.shard.size > 1 || away || casts) {
      bytes.unsharded.push_back(flat.whole_bytes());
    }
    if (groups.part > 0) bytes.part += flat.whole_bytes() / groups.part;
  }

  void AddGradients(const PlannedFlat& flat, const Groups& groups,
                    UnitBytes& bytes) {
    const int64_t segment = flat.segment_numel() * SizeOf(flat.reduced);
    simulator::UnitMessages& messages = result_.shape.messages.back();
    messages.segment += segment;
    messages.reduce += segment * groups.shard.size;
    messages.gradients += flat.layout.numel() * SizeOf(flat.computed);
    bytes.trainable = true;
    bytes.takes_gradients &= TakesGradients(flat);
    bytes.reduce_buffers.push_back(segment * groups.shard.size);
    if (RestsElsewhere(next_flat_, RestingKind::kGradients)) return;
    bytes.gradient += flat.shard_gradient_bytes();
  }

  // Returns whether the gradients of autograd become those of the shard, as
  // they may on one rank.
  bool TakesGradients(const PlannedFlat& flat) const {
    const GradientOptions& scaling = options_.gradients;
    return mesh_.world()->world_size() == 1 && !options_.offload.any() &&
           scaling.divide_factor.value_or(1) == 1 &&
           scaling.predivide_factor.value_or(1) == 1 &&
           flat.reduced == flat.of_shard && flat.computed == flat.of_shard;
  }

  const ShardPlan& plan_;
  const comm::Mesh& mesh_;
  const Options& options_;
  std::vector<Groups> groups_;                   // by unit
  std::vector<std::vector<PlannedFlat>> flats_;  // by unit
  std::vector<int> first_users_;                 // modules, by parameter
  int next_flat_ = 0;
  PlannedModel result_;
};

}  // namespace

MemoryPlan PlannedModel::PlanMemory(const MemoryPlanOptions& options) const {
  MemoryPlan plan =
      fsdp::PlanMemory(shape.units, shape.bytes, schedule, options);
  if (offload.has_value()) plan.transfers = offload->transfer_bytes;
  return plan;
}

absl::StatusOr<PlannedModel> PlanModel(const ShardPlan& plan,
                                       const comm::Mesh& mesh,
                                       const Options& options) {
  return Planner(plan, mesh, options).Plan();
}

}  // namespace fsdp
