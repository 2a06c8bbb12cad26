#include "fsdp/setup/shard_plan.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/Type.h>

#include <cmath>
#include <map>
#include <optional>
#include <tuple>
#include <typeinfo>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "flat_param/guarded_storage.h"
#include "flat_param/module_walk.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/memory/buffer_layout.h"
#include "fsdp/model/sequential_adapter.h"
#include "fsdp/runtime/gradient_buffer.h"

namespace fsdp {
namespace {

int64_t SizeOf(c10::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

bool AnyTrainable(const std::vector<at::Tensor>& tied) {
  return absl::c_any_of(tied,
                        [](const at::Tensor& t) { return t.requires_grad(); });
}

// A module holds a parameter in its dictionary and in a member.
constexpr int kReferencesPerUse = 2;

// Refuses a model if something else refers to every trainable parameter, as an
// optimizer does: their use counts exceed what registrations explain.
absl::Status CheckOutsideReferences(const ModuleTree& tree) {
  std::map<const void*, int> uses;
  // A module in two places holds its parameters once.
  std::set<std::pair<int, std::string>> counted;
  for (const ParameterUse& use : tree.uses) {
    const std::string key = use.name.substr(use.name.rfind('.') + 1);
    if (!counted.insert({tree.nodes[use.module].identity, key}).second) {
      continue;
    }
    for (const at::Tensor& tensor : tree.parameters[use.parameter]) {
      ++uses[tensor.unsafeGetTensorImpl()];
    }
  }
  bool any = false;
  for (const std::vector<at::Tensor>& tensors : tree.parameters) {
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.requires_grad()) continue;
      any = true;
      // One reference is the tree's own.
      const int explained =
          1 + kReferencesPerUse * uses[tensor.unsafeGetTensorImpl()];
      if (static_cast<int>(tensor.use_count()) <= explained) {
        return absl::OkStatus();
      }
    }
  }
  if (!any) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "something besides the module refers to every trainable parameter. If it "
      "is an optimizer, it would go on without training anything: make it "
      "after sharding, from Parameters(). If it is a list or a loss of yours, "
      "drop it first or set Options::checks.outside_references to false");
}

absl::Status CheckOneDevicePerUnit(const ShardPlan& plan) {
  for (const PlannedUnit& planned : plan.units) {
    const at::Tensor* first = nullptr;
    for (const OwnedParameter& owned : planned.unit.parameters) {
      const at::Tensor& tensor = plan.tree.parameters[owned.parameter].front();
      if (first == nullptr) first = &tensor;
      if (tensor.device() == first->device()) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", owned.names.front(), " of unit ",
                       DisplayName(planned.unit), " is on ",
                       tensor.device().str(), ", another is on ",
                       first->device().str(), ": a unit lives on one device"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckUnitOptions(const std::string& name,
                              const UnitOptions& options,
                              const comm::Mesh& mesh) {
  FSDP_RETURN_IF_ERROR(
      Annotate(options.precision.Validate(), absl::StrCat("unit ", name)));
  const ShardingStrategy strategy = options.strategy;
  const bool hybrid = strategy == ShardingStrategy::kHybridShard ||
                      strategy == ShardingStrategy::kHybridShardGradOp;
  if (hybrid && mesh.num_dimensions() != 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "unit ", name, " has the strategy ", ToString(options.strategy),
        ", which needs a mesh of two dimensions, the first to replicate and "
        "the second to shard; this one has ",
        mesh.num_dimensions()));
  }
  if (!options.backward_group_size.has_value()) return absl::OkStatus();
  const int group = *options.backward_group_size;
  if (group == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("unit ", name,
                     ": backward_group_size is 0: leave it unset to keep the "
                     "shard alone"));
  }
  // Other strategies keep the unit from forward to backward.
  if (strategy != ShardingStrategy::kFullShard &&
      strategy != ShardingStrategy::kHybridShard) {
    return absl::InvalidArgumentError(absl::StrCat(
        "unit ", name, " has a backward_group_size, but its strategy, ",
        ToString(options.strategy),
        ", has no gather for backward to make smaller"));
  }
  const int row = hybrid ? mesh.dimension(1).size : mesh.world()->world_size();
  if (group >= 1 && row % group == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("unit ", name, ": backward_group_size is ", group,
                   ", which does not divide the ", row,
                   " ranks it is sharded "
                   "over"));
}

absl::Status CheckOptions(const Options& options) {
  const auto positive = [](const std::optional<double>& factor) {
    return !factor.has_value() || (*factor > 0 && std::isfinite(*factor));
  };
  if (!positive(options.gradients.divide_factor) ||
      !positive(options.gradients.predivide_factor)) {
    return absl::InvalidArgumentError(
        "Options::gradients: what gradients are divided by has to be positive "
        "and finite");
  }
  if (options.timeout.has_value() && *options.timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Options::timeout is ", absl::FormatDuration(*options.timeout),
        ": leave it unset for the communicator's"));
  }
  FSDP_RETURN_IF_ERROR(options.offload.Validate());
  return options.quantize.Validate();
}

PlannedUnit PlanUnit(const ModuleTree& tree, Unit unit,
                     const Options& options) {
  PlannedUnit planned{std::move(unit), options.unit, {}, false};
  const std::string& path = tree.nodes[planned.unit.module].path;
  if (options.configure_unit) {
    options.configure_unit(path, *tree.modules[planned.unit.module],
                           planned.options);
  }
  const MixedPrecision& precision = planned.options.precision;
  std::set<int> kept;
  // A tied parameter keeps its dtype if any module that uses it does.
  for (const ParameterUse& use : tree.uses) {
    if (precision.param_dtype.has_value() &&
        precision.Keeps(*tree.modules[use.module])) {
      kept.insert(use.parameter);
    }
  }
  for (const OwnedParameter& owned : planned.unit.parameters) {
    const c10::ScalarType stored =
        tree.parameters[owned.parameter].front().scalar_type();
    planned.compute_dtypes.push_back(kept.count(owned.parameter) > 0
                                         ? stored
                                         : precision.ParamDtype(stored));
  }
  return planned;
}

// Leaves out units that own nothing: the units inside them belong to the next
// one outside.
void PlanUnitsOf(std::vector<Unit> units, const Options& options,
                 ShardPlan& plan) {
  std::vector<int> kept(units.size(), -1);
  for (size_t i = 0; i < units.size(); ++i) {
    Unit& unit = units[i];
    const int parent = unit.parent == -1 ? -1 : kept[unit.parent];
    if (i > 0 && unit.parameters.empty()) {
      kept[i] = parent;
      continue;
    }
    unit.parent = parent;
    kept[i] = static_cast<int>(plan.units.size());
    for (const OwnedParameter& owned : unit.parameters) {
      const std::string& name = owned.names.front();
      if (options.init.loaded_later && options.init.loaded_later(name)) {
        plan.loaded_later.insert(name);
      }
    }
    plan.units.push_back(PlanUnit(plan.tree, std::move(unit), options));
  }
}

absl::Status NoUnitIsRecomputed(const ShardPlan& plan) {
  if (plan.units.size() == 1) {
    return absl::InvalidArgumentError(
        "Options::recompute.units has no unit to choose: the model has none "
        "but the root, which is not recomputed. Let Options::wrap_policy make "
        "units");
  }
  constexpr size_t kShown = 4;
  std::vector<std::string> names;
  for (size_t i = 1; i < plan.units.size() && i <= kShown; ++i) {
    names.push_back(DisplayName(plan.units[i].unit));
  }
  if (plan.units.size() > kShown + 1) names.push_back("...");
  return absl::InvalidArgumentError(absl::StrCat(
      "Options::recompute.units has chosen none of the units ",
      absl::StrJoin(names, ", "),
      ": let it choose one, or leave it empty. fsdp::EveryUnit() chooses all"));
}

absl::Status NotAUnit(const ShardPlan& plan, size_t node) {
  const torch::nn::Module& module = *plan.tree.modules[node];
  return absl::InvalidArgumentError(absl::StrCat(
      "Options::recompute.units has chosen ", plan.tree.nodes[node].path,
      ", of type ", c10::demangle(typeid(module).name()), ", which is no unit",
      plan.tree.nodes[node].is_unit
          ? " although Options::wrap_policy has chosen it: it owns no parameter"
          : "",
      ": units are recomputed as a whole. Choose a unit, let "
      "Options::wrap_policy make one of it, or put its call into "
      "fsdp::Checkpoint()"));
}

// Asks the policy about each module once, like the wrap policy.
absl::Status ChooseRecomputed(const WrapPolicy& policy, ShardPlan& plan) {
  if (!policy) return absl::OkStatus();
  std::map<int, PlannedUnit*> unit_of;  // by the module's identity
  for (PlannedUnit& planned : plan.units) {
    unit_of[plan.tree.nodes[planned.unit.module].identity] = &planned;
  }
  std::set<int> asked;
  bool any = false;
  for (size_t node = 1; node < plan.tree.nodes.size(); ++node) {
    const torch::nn::Module& module = *plan.tree.modules[node];
    const int identity = plan.tree.nodes[node].identity;
    if (!CanBeUnit(module) || !asked.insert(identity).second) continue;
    const auto unit = unit_of.find(identity);
    const bool is_unit = unit != unit_of.end();
    if (!policy({plan.tree.nodes[node].path, module,
                 plan.tree.unowned_numel[node], is_unit})) {
      continue;
    }
    if (!is_unit) return NotAUnit(plan, node);
    unit->second->recomputed = any = true;
  }
  return any ? absl::OkStatus() : NoUnitIsRecomputed(plan);
}

// Gives each buffer to the innermost unit around its module.
void PlanBuffers(ShardPlan& plan) {
  std::vector<int> unit_of(plan.tree.nodes.size(), -1);
  for (size_t i = 0; i < plan.units.size(); ++i) {
    unit_of[plan.units[i].unit.module] = static_cast<int>(i);
  }
  std::set<const void*> seen;
  for (size_t node = 0; node < plan.tree.nodes.size(); ++node) {
    int& unit = unit_of[node];
    if (unit == -1) unit = unit_of[plan.tree.nodes[node].parent];
    const torch::nn::Module& module = *plan.tree.modules[node];
    const MixedPrecision& precision = plan.units[unit].options.precision;
    for (const auto& item : module.named_buffers(/*recurse=*/false)) {
      const at::Tensor& buffer = item.value();
      if (!buffer.defined() ||
          !seen.insert(buffer.unsafeGetTensorImpl()).second) {
        continue;
      }
      const c10::ScalarType stored = buffer.scalar_type();
      const bool casts =
          c10::isFloatingType(stored) && !precision.Keeps(module);
      plan.buffers.push_back(
          {flat_param::JoinName(plan.tree.nodes[node].path, item.key()), buffer,
           stored, casts ? precision.buffer_dtype.value_or(stored) : stored,
           unit});
    }
  }
}

}  // namespace

absl::StatusOr<ShardPlan> PlanSharding(
    const std::shared_ptr<torch::nn::Module>& root, const comm::Mesh& mesh,
    const Options& options) {
  if (c10::InferenceMode::is_enabled()) {
    return absl::FailedPreconditionError(
        "a model cannot be sharded in inference mode, whose tensors have no "
        "versions: leave it first. Sharded models run in it");
  }
  if (DeferredInit::IsActive()) {
    return absl::FailedPreconditionError(
        "a model cannot be sharded inside a DeferredInit scope, in which no "
        "tensor gets memory: end the scope first");
  }
  FSDP_RETURN_IF_ERROR(flat_param::CheckGuardedStorage());
  FSDP_RETURN_IF_ERROR(CheckSequentialAdapter());
  FSDP_RETURN_IF_ERROR(CheckOptions(options));
  ShardPlan plan;
  FSDP_ASSIGN_OR_RETURN(plan.tree, ReadModuleTree(root, options));
  FSDP_ASSIGN_OR_RETURN(std::vector<Unit> units,
                        PlanUnits(plan.tree.nodes, plan.tree.uses));
  PlanUnitsOf(std::move(units), options, plan);
  FSDP_RETURN_IF_ERROR(ChooseRecomputed(options.recompute.units, plan));
  for (const PlannedUnit& planned : plan.units) {
    FSDP_RETURN_IF_ERROR(
        CheckUnitOptions(DisplayName(planned.unit), planned.options, mesh));
  }
  PlanBuffers(plan);
  for (const CastBuffer& buffer : plan.buffers) {
    if (!options.init.broadcast) break;
    FSDP_RETURN_IF_ERROR(CheckCanBeSent(buffer.name, buffer.tensor));
  }
  if (options.checks.outside_references) {
    FSDP_RETURN_IF_ERROR(CheckOutsideReferences(plan.tree));
  }
  FSDP_RETURN_IF_ERROR(CheckOneDevicePerUnit(plan));
  return plan;
}

// Leaves out directories, which may differ between ranks.
std::string Fingerprint(const OffloadOptions& offload) {
  if (!offload.any()) return "";
  return absl::StrCat(
      "offload: parameters ", ToString(offload.parameters), ", gradients ",
      ToString(offload.gradients), ", optimizer ", ToString(offload.optimizer),
      ", memory budget ", offload.memory_budget.value_or(0), ", buffers ",
      offload.buffer_bytes.value_or(0), ", prefetch distance ",
      offload.prefetch_distance, ", optimizer state ", offload.optimizer_state,
      ", step on ", ToString(offload.step_on), ", rollback ", offload.rollback,
      ", keep ", offload.keep ? offload.name : "nothing", "\n");
}

std::string Fingerprint(const ShardPlan& plan, const Options& options) {
  std::string text = absl::StrCat(
      "options: reshard root ", options.reshard_root_after_forward,
      ", prefetch forward ", options.prefetch.forward, ", backward ",
      options.prefetch.backward, ", broadcast ", options.init.broadcast,
      ", divide by ", options.gradients.divide_factor.value_or(0), " and ",
      options.gradients.predivide_factor.value_or(0), ", check order ",
      options.checks.order, ", transparent ", options.transparent,
      ", share memory ", options.share_memory, ", init.module ",
      options.init.module != nullptr, " seed ", options.init.seed, "\n",
      Fingerprint(options.offload));
  if (options.quantize.any()) {
    absl::StrAppend(&text, "quantize: ", options.quantize.ToString(), "\n");
  }
  for (const PlannedUnit& planned : plan.units) {
    absl::StrAppend(&text, "unit ", DisplayName(planned.unit), ": ",
                    ToString(planned.options.strategy), ", backward group ",
                    planned.options.backward_group_size.value_or(0), ", ",
                    planned.options.precision.ToString(),
                    planned.recomputed ? ", recomputed" : "", "\n");
    for (size_t i = 0; i < planned.unit.parameters.size(); ++i) {
      const OwnedParameter& owned = planned.unit.parameters[i];
      const auto& tied = plan.tree.parameters[owned.parameter];
      const at::Tensor& tensor = tied.front();
      absl::StrAppend(&text, "  ", absl::StrJoin(owned.names, " = "), " ",
                      c10::toString(tensor.scalar_type()), " in ",
                      c10::toString(planned.compute_dtypes[i]), " [",
                      absl::StrJoin(tensor.sizes(), ", "), "] strides [",
                      absl::StrJoin(tensor.strides(), ", "), "] ",
                      tensor.device().is_cpu() ? "cpu" : "accelerator",
                      AnyTrainable(tied) ? "" : " frozen",
                      plan.loaded_later.count(owned.names.front()) > 0
                          ? " loaded later"
                          : "",
                      "\n");
    }
  }
  for (const CastBuffer& buffer : plan.buffers) {
    absl::StrAppend(&text, "buffer ", buffer.name, " ",
                    c10::toString(buffer.original), " in ",
                    c10::toString(buffer.wanted), " [",
                    absl::StrJoin(buffer.tensor.sizes(), ", "), "] ",
                    LayoutText(buffer.tensor), "\n");
  }
  return text;
}

int64_t PlannedFlat::shard_bytes() const {
  return layout.shard_numel() * SizeOf(stored);
}

int64_t PlannedFlat::whole_bytes() const {
  return layout.padded_numel() * SizeOf(computed);
}

int64_t PlannedFlat::segment_numel() const {
  const std::vector<bool> all(layout.num_parameters(), true);
  return GradientLayout(layout, all, SizeOf(reduced)).segment_numel();
}

int64_t PlannedFlat::shard_gradient_bytes() const {
  return segment_numel() * SizeOf(of_shard);
}

absl::StatusOr<std::vector<PlannedFlat>> PlanFlats(const ModuleTree& tree,
                                                   const PlannedUnit& planned,
                                                   int ranks) {
  // By the dtypes that they are stored and computed in, and whether they are
  // frozen.
  std::map<std::tuple<c10::ScalarType, c10::ScalarType, bool>,
           std::vector<flat_param::NamedParameter>>
      by_kind;
  for (size_t i = 0; i < planned.unit.parameters.size(); ++i) {
    const OwnedParameter& owned = planned.unit.parameters[i];
    const std::vector<at::Tensor>& tensors = tree.parameters[owned.parameter];
    by_kind[{tensors.front().scalar_type(), planned.compute_dtypes[i],
             !tensors.front().requires_grad()}]
        .push_back({owned.names.front(), tensors});
  }
  const MixedPrecision& precision = planned.options.precision;
  std::vector<PlannedFlat> flats;
  for (auto& [kind, parameters] : by_kind) {
    const auto [stored, computed, frozen] = kind;
    // Parameters that keep their dtype are reduced in it, too.
    const bool kept = computed != precision.ParamDtype(stored);
    const c10::ScalarType reduced = kept && !precision.reduce_dtype.has_value()
                                        ? stored
                                        : precision.ReduceDtype(stored);
    FSDP_ASSIGN_OR_RETURN(
        flat_param::FlatLayout layout,
        flat_param::LayoutOf(
            parameters, SizeOf(computed) < SizeOf(stored) ? computed : stored,
            ranks));
    const bool trainable = absl::c_any_of(
        parameters, [](const flat_param::NamedParameter& parameter) {
          return AnyTrainable(parameter.tensors);
        });
    flats.push_back({stored, computed, reduced,
                     precision.keep_low_precision_grads ? reduced : stored,
                     trainable, std::move(parameters), std::move(layout)});
  }
  return flats;
}

std::vector<RestingFlat> RestingFlatsOf(
    const ShardPlan& plan, const std::vector<std::vector<PlannedFlat>>& flats,
    const OffloadOptions& options) {
  std::vector<RestingFlat> all;
  for (size_t unit = 0; unit < flats.size(); ++unit) {
    for (const PlannedFlat& flat : flats[unit]) {
      RestingFlat& resting = all.emplace_back();
      resting.name = DisplayName(plan.units[unit].unit);
      resting.parameters = flat.shard_bytes();
      if (!flat.trainable) continue;
      resting.gradients = flat.shard_gradient_bytes();
      resting.optimizer = static_cast<int64_t>(
          options.optimizer_state * static_cast<double>(resting.parameters));
    }
  }
  return all;
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
