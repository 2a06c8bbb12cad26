// The calls on a ShardedModel between steps.
#include <ATen/core/Tensor.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "comm/rank_activity.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/autograd/autograd.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/model/sharded_model.h"

namespace fsdp {

void ShardedModel::ZeroGrad(bool set_to_none) {
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
  runtime_->DropWholeGradients();
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

absl::Status ShardedModel::SetReduction(int unit, bool synchronizes,
                                        bool all_reduces) {
  FSDP_RETURN_IF_ERROR(
      CheckIdle("SetRequiresGradientSync() or SetRequiresAllReduce()"));
  GiveUpStaleBackward();
  Event event{EventKind::kSetReduction, unit};
  event.synchronizes = synchronizes;
  event.all_reduces = all_reduces;
  return TransitionOrGiveUp(event, {});
}

absl::Status ShardedModel::StepInBackward(UnitStep step) {
  FSDP_RETURN_IF_ERROR(CheckIdle("StepInBackward()"));
  if (step != nullptr && settings_.commits_steps) {
    return absl::FailedPreconditionError(
        "StepInBackward() with OffloadOptions::keep: files are committed by "
        "whole steps, and in backward units are stepped one by one");
  }
  RuntimeHooks hooks = runtime_->hooks();
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
  runtime_->SetHooks(std::move(hooks));
  return absl::OkStatus();
}

absl::Status ShardedModel::SetReductionHooks(ReduceScatterHook reduce_scatter,
                                             AllReduceHook all_reduce) {
  FSDP_RETURN_IF_ERROR(CheckIdle("SetReductionHooks()"));
  RuntimeHooks hooks = runtime_->hooks();
  if (hooks.reduce_scatter || hooks.all_reduce) {
    return absl::FailedPreconditionError(
        "this model has reduction hooks already: combine them into one");
  }
  hooks.reduce_scatter = std::move(reduce_scatter);
  hooks.all_reduce = std::move(all_reduce);
  runtime_->SetHooks(std::move(hooks));
  return absl::OkStatus();
}

absl::Status ShardedModel::SetGradientDivideFactors(double before,
                                                    double after) {
  FSDP_RETURN_IF_ERROR(CheckIdle("SetGradientDivideFactors()"));
  if (!(before > 0) || !(after > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradients cannot be divided by ", before, " and ", after,
                     ": both factors have to be positive"));
  }
  runtime_->SetGradientScaling({1 / before, 1 / after});
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

}  // namespace fsdp
