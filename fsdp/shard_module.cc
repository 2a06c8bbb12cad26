#include "fsdp/shard_module.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "comm/fence.h"
#include "comm/mesh.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/buffer_precision.h"
#include "fsdp/common_flats.h"
#include "fsdp/deferred_init.h"
#include "fsdp/deferred_modules.h"
#include "fsdp/deferred_tensor.h"
#include "fsdp/describe.h"
#include "fsdp/gradient_buffer.h"
#include "fsdp/placements.h"
#include "fsdp/runtime.h"
#include "fsdp/schedule.h"
#include "fsdp/sequential_adapter.h"
#include "fsdp/shard_gather.h"
#include "fsdp/shard_plan.h"
#include "fsdp/transparent.h"
#include "fsdp/unit_handle.h"
#include "fsdp/unit_plan.h"

namespace fsdp {
namespace {

using ::fsdp::flat_param::FlatParameter;
using ::fsdp::flat_param::NamedParameter;

std::string FreedText(const Unit& unit) {
  return absl::StrCat(
      "the parameters of unit ", DisplayName(unit),
      " are sharded, and this rank holds only a part of them outside the "
      "unit's forward and backward. If this is a forward, let the parent call "
      "its child by fsdp::Forward(child, ...) instead of child->forward(...), "
      "or set Options::transparent. To read or write values use Parameters(), "
      "NamedShards() or "
      "ForEachFullParameter()");
}

GradientScaling ScalingOf(const Options& options, int ranks,
                          c10::ScalarType reduce_dtype) {
  const double factor = options.gradient_divide_factor.value_or(ranks);
  const double before = options.gradient_predivide_factor.value_or(
      1 / MeanOver(ranks, reduce_dtype).before);
  return {1 / before, before / factor};
}

class Sharder {
 public:
  Sharder(ShardPlan plan, const comm::Mesh& mesh, const Options& options,
          absl::Duration timeout)
      : plan_(std::move(plan)),
        world_(*mesh.world()),
        placements_(mesh),
        options_(options),
        timeout_(timeout),
        initializer_(plan_.tree, options.init_module, options.init_seed) {}

  absl::StatusOr<RuntimeUnit> Shard(const PlannedUnit& planned) {
    RuntimeUnit result;
    result.name = DisplayName(planned.unit);
    if (has_values()) {
      FSDP_RETURN_IF_ERROR(initializer_.InitUsersOf(planned.unit));
    }
    FSDP_ASSIGN_OR_RETURN(result.placement, placements_.Of(planned.options));
    std::map<Dtypes, std::vector<NamedParameter>> by_dtypes = ByDtypes(planned);
    for (const OwnedParameter& owned : planned.unit.parameters) {
      plan_.tree.parameters[owned.parameter].clear();
    }
    for (auto& [dtypes, parameters] : by_dtypes) {
      result.shared.push_back(
          {common_.Piece(next_piece_++), dtypes.first == dtypes.second});
      FSDP_ASSIGN_OR_RETURN(
          result.flats.emplace_back(),
          MakeFlat(planned, result, dtypes.second, std::move(parameters)));
      result.gradients.push_back(
          GradientsOf(planned.options.precision, dtypes.first, dtypes.second));
    }
    return result;
  }

  // Before the first unit is sharded: finds memory that ranks have in common.
  absl::Status AllocateCommon() {
    for (const PlannedUnit& planned : plan_.units) {
      FSDP_ASSIGN_OR_RETURN(const Placement placement,
                            placements_.Of(planned.options));
      for (const auto& [dtypes, parameters] : ByDtypes(planned)) {
        FSDP_ASSIGN_OR_RETURN(const flat_param::FlatLayout layout,
                              LayoutFor(parameters, dtypes, *placement.shard));
        common_.Add(placement.shard,
                    layout.padded_numel() *
                        static_cast<int64_t>(c10::elementSize(dtypes.second)));
      }
    }
    return options_.share_memory ? common_.Allocate() : absl::OkStatus();
  }

  std::vector<std::unique_ptr<comm::Fence>> TakeFences() {
    return common_.TakeFences();
  }

  // What is in no unit. Rank 0's buffers everywhere; each rank's own values of
  // what is ignored.
  absl::Status FinishRest(torch::nn::Module& root) {
    if (has_values()) FSDP_RETURN_IF_ERROR(initializer_.InitTheRest());
    FSDP_RETURN_IF_ERROR(Materialize(root));
    return options_.broadcast_parameters ? BroadcastBuffers()
                                         : absl::OkStatus();
  }

  const ShardPlan& plan() const { return plan_; }

 private:
  // Stored and computed in.
  using Dtypes = std::pair<c10::ScalarType, c10::ScalarType>;

  // A unit's parameters, by what becomes one flat parameter.
  std::map<Dtypes, std::vector<NamedParameter>> ByDtypes(
      const PlannedUnit& planned) const {
    std::map<Dtypes, std::vector<NamedParameter>> by_dtypes;
    for (size_t i = 0; i < planned.unit.parameters.size(); ++i) {
      const OwnedParameter& owned = planned.unit.parameters[i];
      const std::vector<at::Tensor>& tensors =
          plan_.tree.parameters[owned.parameter];
      by_dtypes[{tensors.front().scalar_type(), planned.compute_dtypes[i]}]
          .push_back({owned.names.front(), tensors});
    }
    return by_dtypes;
  }

  static absl::StatusOr<flat_param::FlatLayout> LayoutFor(
      const std::vector<NamedParameter>& parameters, const Dtypes& dtypes,
      const comm::Communicator& group) {
    const auto [stored, computed] = dtypes;
    const bool narrows = c10::elementSize(computed) < c10::elementSize(stored);
    return flat_param::LayoutOf(parameters, narrows ? computed : stored,
                                group.world_size());
  }

  // Whether this rank's values are the ones that count.
  bool has_values() const {
    return !options_.broadcast_parameters || world_.rank() == 0;
  }

  absl::Status BroadcastBuffers() {
    c10::NoGradGuard no_grad;
    for (const BufferPrecision::Buffer& buffer : plan_.buffers) {
      if (buffer.tensor.numel() == 0) continue;
      at::Tensor values = buffer.tensor.contiguous();
      FSDP_RETURN_IF_ERROR(
          Broadcast(values.reshape({-1}).view(at::kByte), buffer.name));
      if (!values.is_same(buffer.tensor)) buffer.tensor.copy_(values);
    }
    return absl::OkStatus();
  }

  // What keeps its dtype is reduced in it, too.
  GradientBufferOptions GradientsOf(const MixedPrecision& precision,
                                    c10::ScalarType stored,
                                    c10::ScalarType computed) {
    const bool kept = computed != precision.ParamDtype(stored);
    const c10::ScalarType reduce = kept && !precision.reduce_dtype.has_value()
                                       ? stored
                                       : precision.ReduceDtype(stored);
    return {reduce, precision.keep_low_precision_grads ? reduce : stored,
            ScalingOf(options_, world_.world_size(), reduce)};
  }

  absl::Status Broadcast(const at::Tensor& tensor, const std::string& what) {
    return BroadcastFrom(world_, /*root=*/0, tensor, what,
                         absl::Now() + timeout_);
  }

  // Only rank 0's values are looked at where they are broadcast.
  at::Tensor Flatten(const std::vector<NamedParameter>& parameters,
                     const flat_param::FlatLayout& layout) const {
    if (has_values()) {
      return FlatParameter::Flatten(parameters, layout, ValueOf);
    }
    return at::zeros(
        {layout.padded_numel()},
        parameters.front().tensors.front().options().requires_grad(false));
  }

  absl::StatusOr<std::unique_ptr<FlatParameter>> MakeFlat(
      const PlannedUnit& planned, const RuntimeUnit& unit,
      c10::ScalarType compute_dtype, std::vector<NamedParameter> parameters) {
    const comm::Communicator& group = *unit.placement.shard;
    const c10::ScalarType stored =
        parameters.front().tensors.front().scalar_type();
    FSDP_ASSIGN_OR_RETURN(
        flat_param::FlatLayout layout,
        LayoutFor(parameters, {stored, compute_dtype}, group));
    const SharedFlat& shared = unit.shared.back();
    at::Tensor rest;
    if (shared.holds_shards && shared.memory.defined()) {
      rest = shared.memory.view(stored);
    }
    at::Tensor flat;
    FSDP_RETURN_IF_ERROR(
        TorchToStatus(absl::StrCat("flattening unit ", unit.name),
                      [&] { flat = Flatten(parameters, layout); }));
    if (options_.broadcast_parameters) {
      FSDP_RETURN_IF_ERROR(Broadcast(flat, unit.name));
    }
    std::unique_ptr<FlatParameter> result;
    FSDP_RETURN_IF_ERROR(
        TorchToStatus(absl::StrCat("sharding unit ", unit.name), [&] {
          result = std::make_unique<FlatParameter>(
              std::move(parameters), std::move(layout), flat, group.rank(),
              compute_dtype, FreedText(planned.unit), rest);
        }));
    return result;
  }

  ShardPlan plan_;
  comm::Communicator& world_;
  Placements placements_;
  const Options& options_;
  const absl::Duration timeout_;
  ModuleInitializer initializer_;
  CommonFlats common_;
  int next_piece_ = 0;  // of common_
};

bool IsKeptAfterForward(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::kShardGradOp ||
         strategy == ShardingStrategy::kShardOptimizer ||
         strategy == ShardingStrategy::kNoShard ||
         strategy == ShardingStrategy::kHybridShardGradOp;
}

bool SharesMemory(const RuntimeUnit& unit) {
  return std::any_of(
      unit.shared.begin(), unit.shared.end(),
      [](const SharedFlat& shared) { return shared.memory.defined(); });
}

Schedule MakeSchedule(const std::vector<PlannedUnit>& units,
                      const std::vector<RuntimeUnit>& placed,
                      const Options& options) {
  std::vector<ScheduledUnit> scheduled;
  for (size_t i = 0; i < units.size(); ++i) {
    const UnitOptions& unit = units[i].options;
    ScheduledUnit& result = scheduled.emplace_back();
    result.name = placed[i].name;
    result.parent = units[i].unit.parent;
    result.reshard_after_forward =
        !IsKeptAfterForward(unit.strategy) &&
        (i > 0 || options.reshard_root_after_forward);
    result.shares_memory = SharesMemory(placed[i]);
    // With one copy for all ranks there is nothing to gather by parts.
    result.keeps_part =
        placed[i].placement.part != nullptr && !result.shares_memory;
    result.keep_until_sync =
        unit.strategy == ShardingStrategy::kShardOptimizer ||
        unit.strategy == ShardingStrategy::kNoShard;
    result.replicated = placed[i].placement.replicate != nullptr;
  }
  ScheduleOptions schedule_options;
  schedule_options.forward_prefetch = options.forward_prefetch;
  schedule_options.backward_prefetch = options.backward_prefetch;
  return Schedule(std::move(scheduled), schedule_options);
}

void AttachHandles(const ShardPlan& plan,
                   const std::shared_ptr<ShardedModel>& model,
                   bool transparent) {
  for (size_t i = 0; i < plan.units.size(); ++i) {
    plan.tree.modules[plan.units[i].unit.module]->register_module(
        kUnitHandleName,
        std::make_shared<UnitHandle>(model, static_cast<int>(i)));
  }
  // A transparent unit needs no caller, which would know one signature only.
  if (transparent) return;
  for (const std::shared_ptr<torch::nn::Module>& module : plan.tree.modules) {
    if (auto* sequential = module->as<torch::nn::SequentialImpl>()) {
      AdaptSequential(*sequential);
    }
  }
}

ShardedModel::Settings SettingsOf(
    const ShardPlan& plan, const std::shared_ptr<torch::nn::Module>& root,
    const Options& options) {
  ShardedModel::Settings settings;
  settings.abort_on_failure = options.abort_on_failure;
  settings.check_order = options.check_order;
  settings.ignores_parameters =
      options.ignore_module != nullptr || options.ignore_parameter != nullptr;
  for (const PlannedUnit& planned : plan.units) {
    settings.units.push_back(planned.options);
    for (const OwnedParameter& owned : planned.unit.parameters) {
      for (const std::string& name : owned.names) {
        if (name != owned.names.front()) {
          settings.aliases[name] = owned.names.front();
        }
      }
    }
  }
  settings.is_training = [weak = std::weak_ptr<torch::nn::Module>(root)] {
    const std::shared_ptr<torch::nn::Module> module = weak.lock();
    return module == nullptr || module->is_training();
  };
  settings.buffers = BufferPrecision(plan.buffers);
  return settings;
}

}  // namespace

absl::StatusOr<std::shared_ptr<ShardedModel>> ShardModule(
    const std::shared_ptr<torch::nn::Module>& root, const comm::Mesh& mesh,
    const Options& options) {
  comm::Communicator& world = *mesh.world();
  const absl::Duration timeout = options.timeout == absl::ZeroDuration()
                                     ? world.default_timeout()
                                     : options.timeout;
  absl::StatusOr<ShardPlan> plan = PlanSharding(root, mesh, options);
  FSDP_RETURN_IF_ERROR(comm::Agree(world, plan.status(), "sharding the model",
                                   absl::Now() + timeout));
  FSDP_RETURN_IF_ERROR(comm::CheckSame(world, Fingerprint(*plan, options),
                                       "the models to shard",
                                       absl::Now() + timeout));
  Sharder sharder(*std::move(plan), mesh, options, timeout);
  absl::Status status = sharder.AllocateCommon();
  std::vector<RuntimeUnit> units;
  for (const PlannedUnit& planned : sharder.plan().units) {
    if (!status.ok()) break;
    absl::StatusOr<RuntimeUnit> sharded = sharder.Shard(planned);
    status = sharded.status();
    if (status.ok()) units.push_back(*std::move(sharded));
  }
  if (status.ok()) status = sharder.FinishRest(*root);
  if (!status.ok()) {
    mesh.Abort(status);
    return status;
  }
  Schedule schedule = MakeSchedule(sharder.plan().units, units, options);
  auto runtime = std::make_unique<Runtime>(mesh.world(), std::move(units),
                                           timeout, sharder.TakeFences());
  auto model =
      std::make_shared<ShardedModel>(std::move(runtime), std::move(schedule),
                                     SettingsOf(sharder.plan(), root, options));
  AttachHandles(sharder.plan(), model, options.transparent);
  if (options.transparent) {
    std::vector<int> parents;
    for (const PlannedUnit& planned : sharder.plan().units) {
      parents.push_back(planned.unit.parent);
    }
    model->SetObserver(
        std::make_unique<TransparentUnits>(model.get(), std::move(parents)));
  }
  if (options.verbose && world.rank() == 0) std::cerr << Describe(*model);
  return model;
}

}  // namespace fsdp
