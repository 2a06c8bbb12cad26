// Transfers of tensors between devices with streams and the host.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Device.h>

#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "fsdp/recompute/device_stage.h"
#include "fsdp/recompute/tensor_transfers.h"
#include "offload/host_store.h"

namespace fsdp {
namespace {

// Returns whether `memory` is locked for `device`. Tensor::is_pinned() would
// ask the device that LibTorch finds first.
bool CanCopyBeside(c10::Device device, const void* memory) {
  return at::globalContext()
      .getAcceleratorHooksInterface(device.type())
      .isPinnedPtr(memory);
}

}  // namespace

DeviceStage& TensorTransfers::StageOf(c10::Device device) {
  for (const auto& stage : stages_) {
    if (stage->device() == device) return *stage;
  }
  stages_.push_back(absl::make_unique<DeviceStage>(device, timeout_));
  return *stages_.back();
}

absl::Status TensorTransfers::StartDown(MovedTensor& moved) {
  moved.stage = &StageOf(moved.form.device());
  moved.owner = moved.stage->CurrentStream();
  // Only one device copies into the store's memory: its copies are ordered
  // without the host, so its regions can follow each other there.
  if (memory_ != nullptr &&
      (direct_stage_ == nullptr || direct_stage_ == moved.stage)) {
    FSDP_ASSIGN_OR_RETURN(const absl::Span<char> memory,
                          memory_->MemoryToFill(moved.region));
    if (CanCopyBeside(moved.stage->device(), memory.data())) {
      moved.host = at::from_blob(memory.data(), {moved.form.bytes()},
                                 at::TensorOptions(at::kByte));
      moved.direct = true;
      direct_stage_ = moved.stage;
    }
  }
  if (!moved.direct) {
    FSDP_ASSIGN_OR_RETURN(moved.host, moved.stage->Acquire(moved.form.bytes()));
  }
  FSDP_ASSIGN_OR_RETURN(
      moved.down,
      moved.stage->Down(moved.form.BytesOf(moved.packed), moved.host));
  moved.unordered = true;
  return absl::OkStatus();
}

absl::Status TensorTransfers::FinishDown(MovedTensor& moved,
                                         absl::Time deadline) {
  if (moved.down == nullptr) return absl::OkStatus();
  const absl::Status copied = moved.stage->Await(moved.down, deadline);
  if (absl::IsDeadlineExceeded(copied)) return copied;
  moved.down.reset();
  if (moved.up == nullptr) moved.unordered = false;
  if (!copied.ok()) moved.host.reset();
  return copied;
}

absl::Status TensorTransfers::StartReadToDevice(MovedTensor& moved,
                                                bool ahead) {
  moved.owner = moved.stage->CurrentStream();
  FSDP_ASSIGN_OR_RETURN(moved.ready, moved.stage->Now());
  if (moved.IsBeingWritten()) moved.wanted = true;
  if (moved.host.defined()) return StartUp(moved);
  const absl::Time begin = absl::Now();
  const absl::Status room =
      moved.stage->MakeRoom(moved.form.bytes(), window_bytes_,
                            ahead ? absl::InfinitePast() : begin + timeout_);
  stats_.waited_seconds += absl::ToDoubleSeconds(absl::Now() - begin);
  FSDP_RETURN_IF_ERROR(room);
  FSDP_ASSIGN_OR_RETURN(moved.host, moved.stage->Acquire(moved.form.bytes()));
  const absl::Status started = ReadFromStore(moved);
  if (!started.ok()) DropHost(moved);
  return started;
}

absl::Status TensorTransfers::StartUp(MovedTensor& moved) {
  FSDP_ASSIGN_OR_RETURN(
      moved.up, moved.stage->Up(moved.host, moved.down,
                                moved.form.BytesOf(moved.packed), moved.ready));
  moved.unordered = true;
  if (moved.direct) {
    stats_.bytes_in += moved.form.bytes();
  } else if (moved.in_store && moved.doing == Doing::kNothing) {
    DropHost(moved);
  }
  return absl::OkStatus();
}

void TensorTransfers::DropHost(MovedTensor& moved) {
  if (moved.stage == nullptr || !moved.host.defined()) return;
  if (moved.direct) {
    // The store may reuse erased memory at once. An error means that the device
    // has failed.
    moved.stage->OrderDown(moved.up).IgnoreError();
    direct_erased_ = true;
  } else {
    moved.stage->Release(moved.host, moved.LastCopy());
  }
  moved.host.reset();
}

std::vector<at::Tensor> TensorTransfers::TakeDropped() {
  std::vector<at::Tensor> dropped = std::exchange(dropped_, {});
  for (const auto& stage : stages_) {
    for (at::Tensor& kept : stage->TakeKept()) {
      dropped.push_back(std::move(kept));
    }
  }
  return dropped;
}

}  // namespace fsdp
