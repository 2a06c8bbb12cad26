// What ShardedModel does for steps that are captured and replayed.
#include <ATen/core/Tensor.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "fsdp/model/sharded_model.h"

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

absl::Status ShardedModel::CheckCapturable() const {
  if (!HasStreams(runtime_->device())) {
    return Cannot(absl::StrCat("it is on ", runtime_->device().str(),
                               ", which computes at once. Replays save time "
                               "where a host queues work for a device"));
  }
  if (offload() != nullptr) {
    return Cannot(
        "Options::offload is set, and the host moves what rests elsewhere");
  }
  if (runtime_->hooks().reduce_scatter || runtime_->hooks().all_reduce) {
    return Cannot(
        "SetReductionHooks() was called, and what the host does in a hook "
        "would be done once");
  }
  FSDP_RETURN_IF_ERROR(CheckGroup(&runtime_->communicator()));
  for (int unit = 0; unit < num_units(); ++unit) {
    const Placement& placement = runtime_->placement(unit);
    FSDP_RETURN_IF_ERROR(CheckGroup(placement.shard.get()));
    FSDP_RETURN_IF_ERROR(CheckGroup(placement.replicate.get()));
    FSDP_RETURN_IF_ERROR(CheckGroup(placement.part.get()));
    FSDP_RETURN_IF_ERROR(CheckGroup(placement.quantized.get()));
    if (!recomputes(unit)) continue;
    if (settings_.recompute_options.offload != nullptr) {
      return Cannot(
          absl::StrCat("unit ", unit_name(unit),
                       " is recomputed from arguments that rest elsewhere "
                       "(recompute.options.offload), which the host moves"));
    }
    if (settings_.recompute_options.preserve_rng_state) {
      return Cannot(absl::StrCat(
          "unit ", unit_name(unit),
          " is recomputed with the same random numbers, for which the host "
          "reads the device's generator. Where it draws none, turn "
          "recompute.options.preserve_rng_state off"));
    }
  }
  return absl::OkStatus();
}

absl::Status ShardedModel::PrepareCapturedStep() {
  FSDP_RETURN_IF_ERROR(CheckIdle("CapturedStep::Run()"));
  FSDP_RETURN_IF_ERROR(CheckBinding());
  GiveUpStaleBackward();
  bool any_gathered = false;
  for (int unit = 0; unit < num_units(); ++unit) {
    any_gathered |= schedule_.IsUnsharded(unit);
    if (!runtime_->HasWholeGradients(unit) && !runtime_->HasSums(unit)) {
      continue;
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "CapturedStep::Run() while unit ", unit_name(unit),
        " has gradients that NoSync() or SetRequiresAllReduce() has left: "
        "reduce them, or drop them by zero_grad() of the model"));
  }
  return any_gathered ? ReleaseUnsharded() : absl::OkStatus();
}

absl::Status ShardedModel::FinishOrder() {
  if (order_check_ == nullptr) return absl::OkStatus();
  const auto check = std::exchange(order_check_, nullptr);
  return FinishOrderCheck(*check);
}

absl::Status ShardedModel::BeginCapture() {
  FSDP_RETURN_IF_ERROR(PrepareCapturedStep());
  runtime_->BeginAlike();
  runtime_->ForgetEarlierSteps();
  captures_ = true;
  return absl::OkStatus();
}

void ShardedModel::EndCapture(bool sound) {
  if (!sound) GiveUpIteration(absl::OkStatus(), InFlight::kDrop);
  runtime_->ForgetEarlierSteps();
  captures_ = false;
}

void ShardedModel::NoteReplay() {
  for (const NamedShard& named : named_shards_) {
    named.shard.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace fsdp
