#include "fsdp/model/sharded_model.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <torch/nn/module.h>

#include <array>
#include <cmath>

#include "absl/cleanup/cleanup.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "flat_param/module_walk.h"
#include "fsdp/memory/resting_memory.h"

namespace fsdp {
namespace {

// Returns the bytes that gathering the unit and reducing its gradients take,
// for fsdp/trace.
std::array<c10::IValue, 2> BytesOf(const Runtime& runtime, int unit) {
  int64_t unsharded = 0;
  for (const auto& flat : runtime.flats(unit)) {
    unsharded += flat->unsharded_bytes();
  }
  return {unsharded, runtime.reducer().reduce_buffer_bytes(unit)};
}

std::optional<UnitHandle> AskOwners(const torch::nn::Module& module,
                                    const torch::nn::Module& below) {
  for (const auto& item : flat_param::RegisteredParameters(below)) {
    const ParameterOwner* owner = OwnerOf(item.value());
    if (owner == nullptr) continue;
    std::shared_ptr<ShardedModel> model = owner->model();
    if (model == nullptr) continue;
    const std::optional<int> unit = model->UnitOf(module);
    if (unit.has_value()) return UnitHandle{std::move(model), *unit};
  }
  for (const auto& child : below.children()) {
    std::optional<UnitHandle> found = AskOwners(module, *child);
    if (found.has_value()) return found;
  }
  return std::nullopt;
}

}  // namespace

ShardedModel::ShardedModel(std::unique_ptr<Runtime> runtime, Schedule schedule,
                           Settings settings)
    : runtime_(std::move(runtime)),
      schedule_(std::move(schedule)),
      settings_(std::move(settings)),
      precision_(std::move(settings_.precisions), std::move(settings_.buffers),
                 std::move(settings_.is_training)),
      activity_(runtime_->communicator().activity()),
      owner_(std::make_shared<ParameterOwner>()),
      order_check_(runtime_->communicator(), runtime_->timeout(),
                   /*lags=*/HasStreams(runtime_->device())) {
  std::vector<std::vector<at::Tensor>> buffers(runtime_->num_units());
  for (const CastBuffer& buffer : precision_.buffers()) {
    buffers[buffer.unit].push_back(buffer.tensor);
  }
  for (int unit = 0; unit < runtime_->num_units(); ++unit) {
    UnitState& state = units_.emplace_back(unit_name(unit));
    state.first_shard = ranges_.size();
    state.buffers = std::make_shared<const std::vector<at::Tensor>>(
        std::move(buffers[unit]));
    const auto& replicate = runtime_->placement(unit).replicate;
    const int replica = replicate == nullptr ? 0 : replicate->rank();
    const int replicas = replicate == nullptr ? 1 : replicate->world_size();
    for (const auto& flat : runtime_->flats(unit)) {
      for (int i = 0; i < flat->num_parameters(); ++i) {
        const flat_param::NamedParameter& parameter = flat->parameter(i);
        for (const at::Tensor& tensor : parameter.tensors) {
          SetOwner(tensor, parameter.name, owner_);
        }
        state.parameters.Add(parameter.name, parameter.tensors,
                             flat->ShardSlice(i));
        const flat_param::ParameterSpec& spec = flat->layout().parameter(i);
        ranges_.push_back({spec.name, spec.sizes, spec.strides,
                           flat->layout().InParameter(i, flat->rank()).begin,
                           flat->ShardSlice(i), unit, replica, replicas});
      }
    }
  }
  for (UnitState& state : units_) state.parameters.AttachSentinels();
  SeeVersions();
}

void ShardedModel::SetModules(
    const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
    const std::vector<int>& units) {
  owner_->set_model(weak_from_this());
  for (size_t i = 0; i < modules.size(); ++i) {
    const auto [place, is_new] = modules_.try_emplace(
        modules[i].get(), ModulePlace{modules[i], units[i]});
    // A module that is registered twice names its unit at its first place only.
    if (!is_new && units[i] != kNoUnit) place->second.unit = units[i];
  }
}

std::optional<int> ShardedModel::UnitOf(const torch::nn::Module& module) const {
  const auto found = modules_.find(&module);
  // Another module may have been allocated at the address of a former one.
  if (found == modules_.end() || found->second.module.expired()) {
    return std::nullopt;
  }
  return found->second.unit;
}

void ShardedModel::SeeVersions() {
  for (UnitState& state : units_) state.parameters.SeeVersions();
}

void ShardedModel::RestoreSentinels() {
  for (UnitState& state : units_) {
    // A backward inside a forward ends while units around it are running.
    if (!state.edges_attached || state.node != nullptr) continue;
    state.edges_attached = false;
    state.parameters.RestoreSentinels();
  }
}

ShardedModel::~ShardedModel() { runtime_->DropEverything(); }

absl::Status ShardedModel::CheckNoWholeAccess() const {
  if (whole_access_.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the model's parameters are whole for ", whole_access_,
                   ": end that before anything else is done with the model"));
}

absl::Status ShardedModel::CheckIdle(absl::string_view what) const {
  FSDP_RETURN_IF_ERROR(CheckNoWholeAccess());
  if (!schedule_.in_forward() && !InsideBackward()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      what, " inside a forward or backward: call it between steps"));
}

absl::Status ShardedModel::TransitionOrGiveUp(
    const Event& event, const std::vector<at::Tensor>& gradients) {
  RECORD_USER_SCOPE_WITH_INPUTS(
      absl::StrCat("fsdp::", Name(event.kind), "(", unit_name(event.unit), ")"),
      BytesOf(*runtime_, event.unit));
  if (activity_ != nullptr) NotePhase(event);
  absl::StatusOr<Actions> actions = schedule_.Next(event);
  absl::Status status = actions.status();
  if (status.ok()) status = runtime_->Execute(*actions, gradients);
  // A refused event has changed nothing, and outside an iteration there is
  // nothing to give up.
  if (!actions.ok() && !schedule_.in_forward()) return status;
  if (!status.ok()) GiveUpIteration(status);
  if (activity_ != nullptr && !schedule_.in_forward() &&
      !schedule_.in_backward()) {
    activity_->Note(comm::Phase::kOutside, "", /*pool_bytes=*/-1);
  }
  return status;
}

// Notes what this rank does, for those who ask while it waits for others.
void ShardedModel::NotePhase(const Event& event) {
  const MemoryStats memory = runtime_->memory_stats();
  const int64_t pools =
      memory.parameters.reserved_bytes + memory.gradients.reserved_bytes;
  switch (event.kind) {
    case EventKind::kPreForward:
      return activity_->Note(
          event.recomputes ? comm::Phase::kBackward : comm::Phase::kForward,
          unit_name(event.unit), pools);
    case EventKind::kPreBackward:
    case EventKind::kPostBackward:
      return activity_->Note(comm::Phase::kBackward, unit_name(event.unit),
                             pools);
    case EventKind::kEndOfBackward:
      // It may still wait for reductions.
      return activity_->Note(comm::Phase::kBackward, "", pools);
    default:
      return;
  }
}

// The engine drops the last callback of a backward that throws. Reductions that
// it left in flight are dropped: the user may have dropped gradients since.
void ShardedModel::GiveUpStaleBackward() {
  if (!schedule_.in_backward()) return;
  GiveUpIteration(absl::OkStatus(), InFlight::kDrop);
}

// If `reason` is OK, other ranks are not told.
void ShardedModel::GiveUpIteration(const absl::Status& reason,
                                   InFlight reductions) {
  RECORD_USER_SCOPE(absl::StrCat("fsdp::", Name(EventKind::kReset), "(",
                                 unit_name(kRoot), ")"));
  if (!reason.ok() && settings_.abort_on_failure && !captures_) {
    runtime_->Abort(reason);
  }
  // Ignores the schedule's actions: the runtime drops everything.
  schedule_.Next({EventKind::kReset}).IgnoreError();
  if (reductions == InFlight::kFinish)
    runtime_->reducer().FinishReductions(
        [this](int unit) { return schedule_.all_reduces(unit); });
  runtime_->DropEverything(/*sent=*/!captures_);
  for (int unit = 0; unit < num_units(); ++unit) {
    schedule_.SetKept(unit, runtime_->reducer().HasWholeGradients(unit),
                      runtime_->reducer().HasSums(unit));
  }
  order_check_.Drop();
  backward_.Forget();
  for (UnitState& state : units_) {
    state.node.reset();
    state.running.reset();
  }
  RestoreSentinels();
  SeeVersions();
  if (observer_ != nullptr) observer_->OnGivenUp();
}

absl::Status ShardedModel::ReleaseUnsharded() {
  return TransitionOrGiveUp({EventKind::kRelease}, {});
}

void ShardedModel::ZeroGrad(bool set_to_none) {
  // A backward that was given up may still add to the gradients.
  runtime_->reducer().EndOfBackward();
  for (const TensorRange& named : ranges_) {
    at::Tensor gradient = named.values.grad();
    if (!gradient.defined()) continue;
    if (set_to_none) {
      named.values.mutable_grad().reset();
    } else {
      const Resident resident =
          ValueOrThrow(Resident::Of(gradient, Use::kUpdate));
      gradient.zero_();
    }
  }
  for (int unit = 0; unit < num_units(); ++unit) {
    schedule_.SetKept(unit, /*whole_gradients=*/false, /*sums=*/false);
  }
  runtime_->reducer().DropWholeGradients();
}

absl::Status ShardedModel::SetTrainable(absl::string_view name,
                                        bool trainable) {
  FSDP_RETURN_IF_ERROR(CheckIdle("SetTrainable()"));
  const auto alias = settings_.aliases.find(name);
  if (alias != settings_.aliases.end()) name = alias->second;
  for (UnitState& state : units_) {
    const std::vector<UnitParameters::Slot>& slots = state.parameters.slots();
    for (size_t k = 0; k < slots.size(); ++k) {
      if (slots[k].name == name) {
        return state.parameters.SetTrainable(k, trainable);
      }
    }
  }
  return absl::NotFoundError(
      absl::StrCat("the model has no parameter named ", name));
}

absl::Status ShardedModel::SetReduction(int unit,
                                        std::optional<bool> synchronizes,
                                        std::optional<bool> all_reduces) {
  FSDP_RETURN_IF_ERROR(
      CheckIdle("SetRequiresGradientSync() or SetRequiresAllReduce()"));
  GiveUpStaleBackward();
  Event event{EventKind::kSetReduction, unit};
  event.synchronizes = synchronizes.value_or(schedule_.synchronizes(unit));
  event.all_reduces = all_reduces.value_or(schedule_.all_reduces(unit));
  return TransitionOrGiveUp(event, {});
}

absl::Status ShardedModel::StepInBackward(UnitStep step) {
  FSDP_RETURN_IF_ERROR(CheckIdle("StepInBackward()"));
  if (step != nullptr && settings_.commits_steps) {
    return absl::FailedPreconditionError(
        "StepInBackward() with OffloadOptions::keep: files are committed by "
        "whole steps, and in backward units are stepped one by one");
  }
  RuntimeHooks hooks = runtime_->reducer().hooks();
  hooks.step = nullptr;
  schedule_.set_step_in_backward(step != nullptr);
  if (step != nullptr) {
    hooks.step = [this, step = std::move(step)](int unit) {
      const UnitState& state = units_[unit];
      const auto note = [this](comm::Phase phase, absl::string_view name) {
        if (activity_ == nullptr) return;
        activity_->Note(phase, name, /*pool_bytes=*/-1);
      };
      note(comm::Phase::kStep, unit_name(unit));
      // The next event tells which unit's backward runs.
      const auto back =
          absl::MakeCleanup([&note] { note(comm::Phase::kBackward, ""); });
      return step(absl::MakeConstSpan(ranges_).subspan(
          state.first_shard, state.parameters.slots().size()));
    };
  }
  runtime_->reducer().SetHooks(std::move(hooks));
  return absl::OkStatus();
}

absl::Status ShardedModel::SetReductionHooks(ReduceScatterHook reduce_scatter,
                                             AllReduceHook all_reduce) {
  FSDP_RETURN_IF_ERROR(CheckIdle("SetReductionHooks()"));
  RuntimeHooks hooks = runtime_->reducer().hooks();
  if (hooks.reduce_scatter || hooks.all_reduce) {
    return absl::FailedPreconditionError(
        "this model has reduction hooks already: combine them into one");
  }
  hooks.reduce_scatter = std::move(reduce_scatter);
  hooks.all_reduce = std::move(all_reduce);
  runtime_->reducer().SetHooks(std::move(hooks));
  return absl::OkStatus();
}

absl::Status ShardedModel::SetGradientDivideFactors(double before,
                                                    double after) {
  FSDP_RETURN_IF_ERROR(CheckIdle("SetGradientDivideFactors()"));
  const auto divides = [](double by) { return by > 0 && std::isfinite(by); };
  if (!divides(before) || !divides(after)) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradients cannot be divided by ", before, " and ", after,
                     ": both factors have to be positive and finite"));
  }
  runtime_->reducer().SetScaling({1 / before, 1 / after});
  return absl::OkStatus();
}

absl::Status ShardedModel::BeginWholeAccess(absl::string_view what,
                                            bool reads_values) {
  FSDP_RETURN_IF_ERROR(CheckIdle(what));
  FSDP_RETURN_IF_ERROR(CheckBinding());
  if (reads_values) FSDP_RETURN_IF_ERROR(CheckLoaded());
  GiveUpStaleBackward();
  // This also frees what was kept for a backward that has not come.
  FSDP_RETURN_IF_ERROR(ReleaseUnsharded());
  whole_access_ = std::string(what);
  owner_->OpenGradients();
  for (const UnitState& state : units_) state.parameters.ClearEdges();
  return absl::OkStatus();
}

void ShardedModel::EndWholeAccess() {
  whole_access_.clear();
  owner_->CloseGradients();
  for (UnitState& state : units_) state.parameters.AttachSentinels();
  SeeVersions();
}

absl::Status ShardedModel::CheckLoaded() {
  std::set<std::string>& names = settings_.loaded_later;
  if (names.empty()) return absl::OkStatus();
  for (const TensorRange& named : ranges_) {
    if (names.count(named.name) == 0) continue;
    FSDP_ASSIGN_OR_RETURN(const Resident resident,
                          Resident::Of(named.values, Use::kRead));
    if (!flat_param::HasNoValues(named.values)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "parameter ", named.name,
        " has no values: Options::init.loaded_later said that the program "
        "would load it before it uses the model, and it has not. Load it, or "
        "let it be drawn"));
  }
  names.clear();
  return absl::OkStatus();
}

absl::Status ShardedModel::CheckBinding() const {
  for (int unit = 0; unit < num_units(); ++unit) {
    for (const auto& flat : runtime_->flats(unit)) {
      FSDP_RETURN_IF_ERROR(flat->CheckBinding());
    }
  }
  return absl::OkStatus();
}

absl::Status ShardedModel::Request(EventKind kind, int unit) {
  FSDP_RETURN_IF_ERROR(CheckNoWholeAccess());
  if (!InsideBackward()) GiveUpStaleBackward();
  if (kind == EventKind::kUnshard && !schedule_.IsHeldForUser(unit)) {
    units_[unit].versions_asked_for = units_[unit].parameters.ShardVersions();
  }
  return TransitionOrGiveUp({kind, unit}, {});
}

std::optional<UnitHandle> FindUnit(const torch::nn::Module& module) {
  std::optional<UnitHandle> found = AskOwners(module, module);
  if (found.has_value() && found->unit == ShardedModel::kNoUnit) {
    return std::nullopt;
  }
  return found;
}

}  // namespace fsdp
