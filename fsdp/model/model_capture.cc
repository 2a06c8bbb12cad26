#include "fsdp/model/model_capture.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/step_log.h"

namespace fsdp {
namespace {

absl::Status Cannot(const std::string& what) {
  return absl::FailedPreconditionError(
      absl::StrCat("a step of this model cannot be captured: ", what));
}

absl::Status CheckGroup(const comm::Communicator* group) {
  if (group == nullptr || group->CanBeCaptured()) return absl::OkStatus();
  return Cannot(absl::StrCat(
      "operations of the group (", group->ToString(),
      ") are not of the device alone. Use NCCL for the device, and no log and "
      "no extension of quantised gathers"));
}

}  // namespace

absl::Status ModelCapture::CheckCapturable() const {
  const Runtime& runtime = *model_.runtime_;
  if (!HasStreams(runtime.device())) {
    return Cannot(absl::StrCat("it is on ", runtime.device().str(),
                               ", which computes at once. Replays save time "
                               "where a host queues work for a device"));
  }
  if (model_.offload() != nullptr) {
    return Cannot(
        "Options::offload is set, and the host moves what rests elsewhere");
  }
  if (runtime.hooks().reduce_scatter || runtime.hooks().all_reduce) {
    return Cannot(
        "SetReductionHooks() was called, and what the host does in a hook "
        "would be done once");
  }
  FSDP_RETURN_IF_ERROR(CheckGroup(&runtime.communicator()));
  for (int unit = 0; unit < model_.num_units(); ++unit) {
    const Placement& placement = runtime.placement(unit);
    FSDP_RETURN_IF_ERROR(CheckGroup(placement.shard.get()));
    FSDP_RETURN_IF_ERROR(CheckGroup(placement.replicate.get()));
    FSDP_RETURN_IF_ERROR(CheckGroup(placement.part.get()));
    FSDP_RETURN_IF_ERROR(CheckGroup(placement.quantized.get()));
    if (!model_.recomputes(unit)) continue;
    if (model_.recompute_options().offload != nullptr) {
      return Cannot(
          absl::StrCat("unit ", model_.unit_name(unit),
                       " is recomputed from arguments that rest elsewhere "
                       "(recompute.options.offload), which the host moves"));
    }
    if (model_.recompute_options().preserve_rng_state) {
      return Cannot(absl::StrCat(
          "unit ", model_.unit_name(unit),
          " is recomputed with the same random numbers, for which the host "
          "reads the device's generator. Where it draws none, turn "
          "recompute.options.preserve_rng_state off"));
    }
  }
  return absl::OkStatus();
}

absl::Status ModelCapture::PrepareStep() {
  FSDP_RETURN_IF_ERROR(model_.CheckIdle("CapturedStep::Run()"));
  FSDP_RETURN_IF_ERROR(model_.CheckBinding());
  model_.GiveUpStaleBackward();
  const Runtime& runtime = *model_.runtime_;
  bool any_gathered = false;
  for (int unit = 0; unit < model_.num_units(); ++unit) {
    any_gathered |= model_.schedule_.IsUnsharded(unit);
    if (!runtime.HasWholeGradients(unit) && !runtime.HasSums(unit)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "CapturedStep::Run() while unit ", model_.unit_name(unit),
        " has gradients that NoSync() or SetRequiresAllReduce() has left: "
        "reduce them, or drop them by zero_grad() of the model"));
  }
  return any_gathered ? model_.ReleaseUnsharded() : absl::OkStatus();
}

absl::Status ModelCapture::Begin() {
  FSDP_RETURN_IF_ERROR(PrepareStep());
  model_.runtime_->BeginAlike();
  model_.runtime_->ForgetEarlierSteps();
  model_.captures_ = true;
  return absl::OkStatus();
}

void ModelCapture::End(bool sound) {
  if (!sound) {
    model_.GiveUpIteration(absl::OkStatus(), ShardedModel::InFlight::kDrop);
  }
  model_.runtime_->ForgetEarlierSteps();
  model_.captures_ = false;
}

void ModelCapture::NoteReplay() {
  for (const TensorRange& named : model_.Ranges()) {
    named.values.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace fsdp
