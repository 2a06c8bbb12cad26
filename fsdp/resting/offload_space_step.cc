// How OffloadSpace makes an optimizer step all or nothing.
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/rank_activity.h"
#include "fsdp/memory/device_copies.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/resting/kept_files.h"
#include "fsdp/resting/offload_plan.h"
#include "fsdp/resting/offload_space.h"
#include "fsdp/resting/resting_places.h"
#include "offload/offloader.h"

namespace fsdp {

using offload::Offloader;

absl::Status OffloadSpace::BeginStep(const absl::Status& mine) {
  saved_.clear();
  begun_ = false;
  absl::Status status = mine;
  status.Update(broken_);
  // Changes made between steps get a stage of their own, the same on all ranks.
  BeginStage();
  if (options_.rollback && status.ok()) status = FlushStepped();
  if (options_.keep) {
    status = AgreeInTime(status, "beginning a step of the optimizer");
  }
  begun_ = status.ok();
  return status;
}

// Begins a stage on all ranks, whether what follows succeeds or not, so that
// two different commits never have the same number.
void OffloadSpace::BeginStage() {
  if (options_.keep) changed_.fill(true);
  ++stage_.number;
  stage_.session = session_;
}

absl::Status OffloadSpace::CheckStepper(
    const std::shared_ptr<const void>& stepper) {
  if (!options_.keep) return absl::OkStatus();
  const std::shared_ptr<const void> present = stepper_.lock();
  if (present != nullptr && present != stepper) {
    return absl::FailedPreconditionError(
        "another optimizer has stepped this model, and with "
        "OffloadOptions::keep each step() is committed, so that a run could go "
        "on from between the two: give one optimizer several groups of "
        "parameters, or let the other one go first");
  }
  stepper_ = stepper;
  return absl::OkStatus();
}

absl::Status OffloadSpace::FlushStepped() {
  if (releases_ != nullptr) FSDP_RETURN_IF_ERROR(releases_->Settle());
  size_t next = 0;  // in stage_entries_, which has kSteppedKinds' order
  for (RestingKind kind : kSteppedKinds) {
    const int store = stores_[static_cast<int>(kind)];
    if (store < 0) continue;
    bool& changed = changed_[static_cast<int>(kind)];
    const size_t entry = next++;
    if (!changed) continue;
    if (options_.keep) {
      FSDP_ASSIGN_OR_RETURN(const absl::Span<char> bytes,
                            offloader_->Acquire(stage_entries_[entry],
                                                Offloader::Use::kOverwrite));
      std::memcpy(bytes.data(), &stage_, sizeof(stage_));
      offloader_->Release(stage_entries_[entry]);
    }
    const comm::StoreWaitScope wait(activity_.get(), comm::StoreWait::kWrite,
                                    NotedAs(kind));
    FSDP_RETURN_IF_ERROR(offloader_->Flush(store));
    changed = false;
  }
  return absl::OkStatus();
}

absl::Status OffloadSpace::SaveBeforeStep(RestingMemory& shard) {
  const int flat = FlatOf(shard);
  const bool is_saved = std::any_of(
      saved_.begin(), saved_.end(),
      [&](const Saved& saved) { return saved.entry == undo_entries_[flat]; });
  if (is_saved || !IsSavedBeforeStep(plan_.flats[flat], options_)) {
    return absl::OkStatus();
  }
  const at::Tensor values = shard.AsTensor(at::kByte);
  FSDP_ASSIGN_OR_RETURN(const Resident resident,
                        Resident::Of(values, Use::kRead));
  int& entry = undo_entries_[flat];
  if (entry < 0) {
    FSDP_ASSIGN_OR_RETURN(
        entry, offloader_->Add(
                   stores_[static_cast<int>(RestingKind::kOptimizer)],
                   absl::StrCat(RegionName(flat, flats_[flat].name), ", undo"),
                   shard.bytes()));
  }
  absl::StatusOr<absl::Span<char>> room;
  {
    const comm::StoreWaitScope wait(activity_.get(), comm::StoreWait::kRoom,
                                    NotedAs(RestingKind::kParameters, flat));
    room = releases_->Acquire(entry, Offloader::Use::kOverwrite);
  }
  FSDP_ASSIGN_OR_RETURN(const absl::Span<char> bytes, room);
  const at::Tensor copy = at::from_blob(bytes.data(), {shard.bytes()},
                                        at::TensorOptions(at::kByte));
  SharedEvent copied;
  const absl::Status status =
      TorchToStatus("saving a shard before its step", [&] {
        copy.copy_(values, /*non_blocking=*/LocksPages());
        if (!HasStreams(values.device())) return;
        auto event = std::make_shared<DeviceEvent>();
        event->Record(values.device());
        copied = std::move(event);
      });
  releases_->Release(entry, bytes, copied);
  FSDP_RETURN_IF_ERROR(status);
  saved_.push_back({shard.weak_from_this(), entry});
  return absl::OkStatus();
}

absl::Status OffloadSpace::EndStep(const absl::Status& mine) {
  absl::Status agreed = AgreeInTime(mine, "a step of the optimizer");
  if (agreed.ok()) {
    // No rank writes before all have committed. Otherwise a rank that is killed
    // would be at a stage to which the others cannot go back.
    if (options_.keep) {
      // A later run finds the parameters and states, with the step's number.
      ++stage_.finished_step;
      BeginStage();
      AgreeInTime(FlushStepped(), "committing a step").IgnoreError();
    }
    begun_ = false;
    saved_.clear();
    return agreed;
  }
  if (!broken_.ok()) return agreed;
  if (!options_.rollback) {
    return Annotate(agreed,
                    "a step of the optimizer failed half-way, and without "
                    "OffloadOptions::rollback what was stepped stays so");
  }
  const absl::Status undone =
      AgreeInTime(Rollback(), "undoing a step of the optimizer");
  if (undone.ok()) {
    return Annotate(agreed,
                    "a step of the optimizer failed; parameters and optimizer "
                    "states are as before it");
  }
  broken_ = absl::FailedPreconditionError(
      "an earlier step of the optimizer could not be undone, and parameters "
      "and optimizer states are of different steps: make the model anew and "
      "load a checkpoint");
  return Annotate(agreed, absl::StrCat("a step of the optimizer failed and "
                                       "could not be undone (",
                                       undone.message(), ")"));
}

absl::Status OffloadSpace::Rollback() {
  // A step that has not begun has changed nothing.
  if (!std::exchange(begun_, false) || offloader_ == nullptr) {
    return absl::OkStatus();
  }
  FSDP_RETURN_IF_ERROR(releases_->Settle());
  // Restores saved shards before the file that holds them is rolled back.
  absl::Status status;
  for (const Saved& saved : saved_) {
    const std::shared_ptr<RestingMemory> shard = saved.shard.lock();
    if (shard == nullptr) continue;
    const absl::StatusOr<absl::Span<char>> bytes =
        releases_->Acquire(saved.entry, Offloader::Use::kRead);
    status.Update(bytes.status());
    if (!bytes.ok()) continue;
    status.Update(TorchToStatus("restoring a shard", [&] {
      const at::Tensor values = shard->AsTensor(at::kByte);
      const Resident resident =
          ValueOrThrow(Resident::Of(values, Use::kOverwrite));
      values.copy_(at::from_blob(bytes->data(), {shard->bytes()},
                                 at::TensorOptions(at::kByte)));
    }));
    offloader_->Release(saved.entry);
  }
  saved_.clear();
  // Waits for what was written to a device.
  status.Update(releases_->Settle());
  for (RestingKind kind : kSteppedKinds) {
    const int store = stores_[static_cast<int>(kind)];
    if (store < 0) continue;
    const comm::StoreWaitScope wait(activity_.get(), comm::StoreWait::kRead,
                                    NotedAs(kind));
    status.Update(offloader_->Rollback(store));
    changed_[static_cast<int>(kind)] = false;
  }
  return status;
}

}  // namespace fsdp
