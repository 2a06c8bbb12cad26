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
#include "base/tensor_over.h"
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
#include "fsdp/offload_plan.h"
#include "fsdp/offload_space.h"
#include "fsdp/placements.h"
#include "fsdp/resting_memory.h"
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
      const int flat = next_flat_++;
      SharedFlat& shared = result.shared.emplace_back();
      if (pieces_[flat] >= 0) {
        shared = {common_.Piece(pieces_[flat]), dtypes.first == dtypes.second};
      }
      FSDP_ASSIGN_OR_RETURN(
          result.flats.emplace_back(),
          MakeFlat(planned, flat, result, dtypes, std::move(parameters)));
      result.gradients.push_back(GradientsOf(planned, dtypes));
      FSDP_RETURN_IF_ERROR(PlaceGradients(flat, result));
    }
    return result;
  }

  // Collective, before memory in common: decides what rests where, and makes
  // room there.
  absl::Status MakeOffloadSpace(
      const std::shared_ptr<comm::Communicator>& world) {
    if (!options_.offload.any()) return absl::OkStatus();
    // What ranks have to agree on they have: they decide alike.
    FSDP_ASSIGN_OR_RETURN(std::vector<RestingFlat> flats, RestingFlats());
    FSDP_ASSIGN_OR_RETURN(OffloadPlan plan,
                          PlanOffload(flats, options_.offload, IsOnCpu()));
    FSDP_ASSIGN_OR_RETURN(
        space_, OffloadSpace::Make(std::move(flats), std::move(plan),
                                   options_.offload, world, timeout_));
    return absl::OkStatus();
  }
  const std::shared_ptr<OffloadSpace>& offload() const { return space_; }

  // Before the first unit is sharded: finds memory that ranks have in common.
  absl::Status AllocateCommon() {
    for (const PlannedUnit& planned : plan_.units) {
      FSDP_ASSIGN_OR_RETURN(const Placement placement,
                            placements_.Of(planned.options));
      for (const auto& [dtypes, parameters] : ByDtypes(planned)) {
        const int flat = static_cast<int>(pieces_.size());
        if (space_ != nullptr &&
            space_->plan().tier(flat, RestingKind::kParameters) !=
                Tier::kDevice) {
          pieces_.push_back(kNoPiece);
          continue;
        }
        FSDP_ASSIGN_OR_RETURN(const flat_param::FlatLayout layout,
                              LayoutFor(parameters, dtypes, *placement.shard));
        pieces_.push_back(common_.Add(
            placement.shard,
            layout.padded_numel() *
                static_cast<int64_t>(c10::elementSize(dtypes.second))));
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
  GradientBufferOptions GradientsOf(const PlannedUnit& planned,
                                    const Dtypes& dtypes) const {
    const MixedPrecision& precision = planned.options.precision;
    const auto [stored, computed] = dtypes;
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

  bool IsOnCpu() const {
    for (const auto& tensors : plan_.tree.parameters) {
      if (!tensors.empty()) return tensors.front().device().is_cpu();
    }
    return true;
  }

  // In the order in which units are sharded.
  absl::StatusOr<std::vector<RestingFlat>> RestingFlats() {
    std::vector<RestingFlat> flats;
    for (const PlannedUnit& planned : plan_.units) {
      FSDP_ASSIGN_OR_RETURN(const Placement placement,
                            placements_.Of(planned.options));
      for (const auto& [dtypes, parameters] : ByDtypes(planned)) {
        FSDP_ASSIGN_OR_RETURN(const flat_param::FlatLayout layout,
                              LayoutFor(parameters, dtypes, *placement.shard));
        RestingFlat& flat = flats.emplace_back();
        flat.name = DisplayName(planned.unit);
        flat.parameters = layout.shard_numel() *
                          static_cast<int64_t>(c10::elementSize(dtypes.first));
        if (!AnyTrainable(parameters)) continue;
        flat.gradients =
            ShardGradientBytes(layout, GradientsOf(planned, dtypes));
        flat.optimizer = static_cast<int64_t>(options_.offload.optimizer_state *
                                              flat.parameters);
      }
    }
    return flats;
  }

  static bool AnyTrainable(const std::vector<NamedParameter>& parameters) {
    return std::any_of(parameters.begin(), parameters.end(),
                       [](const NamedParameter& parameter) {
                         return parameter.tensors.front().requires_grad();
                       });
  }

  absl::Status PlaceGradients(int flat, RuntimeUnit& unit) {
    if (space_ == nullptr) return absl::OkStatus();
    const FlatParameter& parameter = *unit.flats.back();
    FSDP_ASSIGN_OR_RETURN(
        unit.gradients.back().memory,
        space_->PlaceGradients(
            flat, ShardGradientBytes(parameter.layout(), unit.gradients.back()),
            parameter.device()));
    return absl::OkStatus();
  }

  // Where this rank's shard rests; undefined: in memory of its own.
  absl::StatusOr<at::Tensor> PlaceShard(int flat, RuntimeUnit& unit,
                                        const flat_param::FlatLayout& layout,
                                        c10::ScalarType stored,
                                        c10::Device device) {
    const SharedFlat& shared = unit.shared.back();
    at::Tensor rest;
    if (shared.holds_shards && shared.memory.defined()) {
      const flat_param::Slice range =
          layout.ShardRange(unit.placement.shard->rank());
      rest = RangeOf(shared.memory, stored, range.begin, range.numel());
    }
    unit.resting.emplace_back();
    if (space_ == nullptr) return rest;
    FSDP_ASSIGN_OR_RETURN(
        unit.resting.back(),
        space_->PlaceParameters(
            flat,
            layout.shard_numel() *
                static_cast<int64_t>(c10::elementSize(stored)),
            device, rest));
    return unit.resting.back()->AsTensor(stored);
  }

  absl::StatusOr<std::unique_ptr<FlatParameter>> MakeFlat(
      const PlannedUnit& planned, int flat_index, RuntimeUnit& unit,
      const Dtypes& dtypes, std::vector<NamedParameter> parameters) {
    const comm::Communicator& group = *unit.placement.shard;
    FSDP_ASSIGN_OR_RETURN(flat_param::FlatLayout layout,
                          LayoutFor(parameters, dtypes, group));
    FSDP_ASSIGN_OR_RETURN(
        const at::Tensor rest,
        PlaceShard(flat_index, unit, layout, dtypes.first,
                   parameters.front().tensors.front().device()));
    at::Tensor flat;
    FSDP_RETURN_IF_ERROR(
        TorchToStatus(absl::StrCat("flattening unit ", unit.name),
                      [&] { flat = Flatten(parameters, layout); }));
    if (options_.broadcast_parameters) {
      FSDP_RETURN_IF_ERROR(Broadcast(flat, unit.name));
    }
    // What an earlier run has kept counts more than what the module has.
    const bool kept = space_ != nullptr && space_->step() > 0;
    FSDP_ASSIGN_OR_RETURN(
        const Resident resident,
        Resident::Of(rest, kept ? Use::kUpdate : Use::kOverwrite));
    const at::Tensor values = kept ? rest.clone() : at::Tensor();
    std::unique_ptr<FlatParameter> result;
    FSDP_RETURN_IF_ERROR(
        TorchToStatus(absl::StrCat("sharding unit ", unit.name), [&] {
          result = std::make_unique<FlatParameter>(
              std::move(parameters), std::move(layout), flat, group.rank(),
              dtypes.second, FreedText(planned.unit), rest);
          if (kept) rest.copy_(values);
        }));
    return result;
  }

  ShardPlan plan_;
  comm::Communicator& world_;
  Placements placements_;
  const Options& options_;
  const absl::Duration timeout_;
  ModuleInitializer initializer_;
  std::shared_ptr<OffloadSpace> space_;  // null: nothing is offloaded
  CommonFlats common_;
  static constexpr int kNoPiece = -1;
  std::vector<int> pieces_;  // of common_, for each flat parameter
  int next_flat_ = 0;
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
    result.rests_elsewhere = std::any_of(
        placed[i].flats.begin(), placed[i].flats.end(),
        [](const auto& flat) { return RestsElsewhere(flat->shard()); });
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
  schedule_options.load_distance = options.offload.prefetch_distance;
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
    const Options& options, std::shared_ptr<OffloadSpace> offload) {
  ShardedModel::Settings settings;
  settings.offload = std::move(offload);
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
  FSDP_RETURN_IF_ERROR(sharder.MakeOffloadSpace(mesh.world()));
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
  auto model = std::make_shared<ShardedModel>(
      std::move(runtime), std::move(schedule),
      SettingsOf(sharder.plan(), root, options, sharder.offload()));
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
