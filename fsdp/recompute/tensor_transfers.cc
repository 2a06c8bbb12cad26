#include "fsdp/recompute/tensor_transfers.h"

#include <ATen/Context.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/recompute/device_stage.h"

namespace fsdp {
namespace {

bool Remove(std::vector<MovedTensorPtr>& list, const MovedTensorPtr& moved) {
  const auto found = std::find(list.begin(), list.end(), moved);
  if (found == list.end()) return false;
  list.erase(found);
  return true;
}

std::string What(absl::string_view what, const MovedTensor& moved) {
  return absl::StrCat(what, " region '", moved.region, "', offset 0, ",
                      moved.form.bytes(), " bytes");
}

}  // namespace

bool MovedTensor::CanDrop() const {
  if (doing == Doing::kReading) return false;
  if (stage == nullptr) return in_store && doing == Doing::kNothing;
  if (doing == Doing::kWriting && up == nullptr) return false;
  return in_store || host.defined();
}

TensorTransfers::TensorTransfers(std::unique_ptr<offload::ParamStore> store,
                                 int64_t window_bytes, absl::Duration timeout,
                                 std::shared_ptr<comm::RankActivity> activity)
    : store_(std::move(store)),
      memory_(dynamic_cast<offload::HostStore*>(store_.get())),
      window_bytes_(window_bytes),
      timeout_(timeout),
      activity_(std::move(activity)) {}

// Ends copies and transfers before their memory and the store go.
TensorTransfers::~TensorTransfers() {
  stages_.clear();
  writing_.clear();
  reading_.clear();
}

MovedTensorPtr TensorTransfers::Write(const at::Tensor& tensor,
                                      const PackedForm& form,
                                      std::string region) {
  auto moved = std::make_shared<MovedTensor>(form, std::move(region));
  if (!MakeRoomToWrite(*moved)) return nullptr;
  const absl::Status created = store_->Create(moved->region, form.bytes());
  if (absl::IsResourceExhausted(created)) {
    ++stats_.full;
    return nullptr;
  }
  if (!created.ok()) {
    Failed(created);
    return nullptr;
  }
  moved->in_store = true;
  const absl::Status started = StartWrite(*moved, tensor);
  if (!started.ok()) {
    Erase(*moved);
    DropHost(*moved);
    Failed(Annotate(started, What("write", *moved)));
    return nullptr;
  }
  moved->doing = Doing::kWriting;
  writing_.push_back(moved);
  writing_bytes_ += form.bytes();
  return moved;
}

// Only the first caller waits for a store that hangs.
bool TensorTransfers::MakeRoomToWrite(const MovedTensor& moved) {
  while (!writing_.empty() &&
         writing_bytes_ + moved.form.bytes() > window_bytes_) {
    const MovedTensorPtr oldest = writing_.front();
    if (oldest->direct) {
      // It was copied straight into the store's memory: the stream waits.
      const absl::Status ordered =
          oldest->stage->Order(*oldest->owner, oldest->down);
      oldest->unordered = false;
      if (!ordered.ok()) oldest->host.reset();
      oldest->doing = Doing::kNothing;
      WriteIsOver(oldest, ordered);
      continue;
    }
    const absl::Status settled = Settle(
        oldest, writes_hang_ ? absl::InfinitePast() : absl::Now() + timeout_);
    if (!absl::IsDeadlineExceeded(settled)) continue;
    writes_hang_ = true;
    Failed(Annotate(settled, What("write", *oldest)));
    return false;
  }
  return true;
}

absl::Status TensorTransfers::StartWrite(MovedTensor& moved,
                                         const at::Tensor& tensor) {
  FSDP_RETURN_IF_ERROR(
      TorchToStatus("pack", [&] { moved.packed = moved.form.Pack(tensor); }));
  if (HasStreams(moved.form.device())) return StartDown(moved);
  moved.host = moved.packed;
  return GiveToStore(moved, absl::Now() + timeout_);
}

absl::Status TensorTransfers::GiveToStore(MovedTensor& moved,
                                          absl::Time deadline) {
  if (direct_erased_) {
    FSDP_RETURN_IF_ERROR(direct_stage_->AwaitAll(deadline));
    direct_erased_ = false;
  }
  FSDP_ASSIGN_OR_RETURN(
      moved.transfer,
      store_->Write(
          moved.region, 0,
          absl::MakeSpan(static_cast<const char*>(moved.host.const_data_ptr()),
                         moved.form.bytes())));
  return absl::OkStatus();
}

absl::Status TensorTransfers::StartRead(const MovedTensorPtr& moved,
                                        bool ahead) {
  if (moved->packed.defined()) return absl::OkStatus();
  absl::Status started = TorchToStatus(
      "allocate", [&] { moved->packed = moved->form.Allocate(); });
  if (started.ok() && moved->stage != nullptr) {
    started = StartReadToDevice(*moved, ahead);
  } else if (started.ok()) {
    moved->host = moved->packed;
    started = ReadFromStore(*moved);
  }
  if (!started.ok()) {
    DropPacked(*moved);
    return Annotate(started, What("read", *moved));
  }
  moved->ahead = ahead;
  JoinReading(moved);
  return absl::OkStatus();
}

absl::Status TensorTransfers::ReadFromStore(MovedTensor& moved) {
  FSDP_ASSIGN_OR_RETURN(
      moved.transfer,
      store_->Read(
          moved.region, 0,
          absl::MakeSpan(static_cast<char*>(moved.host.mutable_data_ptr()),
                         moved.form.bytes())));
  moved.doing = Doing::kReading;
  return absl::OkStatus();
}

absl::StatusOr<at::Tensor> TensorTransfers::Read(const MovedTensorPtr& moved) {
  FSDP_RETURN_IF_ERROR(StartRead(moved, /*ahead=*/false));
  const bool ahead = std::exchange(moved->ahead, false);
  absl::Status read = FinishRead(moved);
  if (ahead && !moved->packed.defined()) {
    FSDP_RETURN_IF_ERROR(StartRead(moved, /*ahead=*/false));
    read = FinishRead(moved);
  }
  at::Tensor tensor;
  if (read.ok()) {
    read = TorchToStatus("unpack",
                         [&] { tensor = moved->form.Unpack(moved->packed); });
  }
  if (!read.ok()) return Annotate(read, What("read", *moved));
  return tensor;
}

absl::Status TensorTransfers::FinishRead(const MovedTensorPtr& moved) {
  if (moved->doing == Doing::kReading) {
    FSDP_RETURN_IF_ERROR(Settle(moved, absl::Now() + timeout_));
  }
  if (moved->up == nullptr || !moved->packed.defined()) {
    return absl::OkStatus();
  }
  FSDP_RETURN_IF_ERROR(
      moved->stage->Use(moved->packed, *moved->owner, moved->up));
  moved->unordered = false;
  return absl::OkStatus();
}

absl::Status TensorTransfers::Settle(const MovedTensorPtr& moved,
                                     absl::Time deadline) {
  const absl::Time begin = absl::Now();
  const bool writes = moved->IsBeingWritten();
  absl::Status result;
  {
    const comm::StoreWaitScope wait(
        activity_.get(),
        writes ? comm::StoreWait::kWrite : comm::StoreWait::kRead,
        moved->region);
    result = writes ? FinishWrite(*moved, deadline)
                    : moved->transfer->Wait(deadline);
  }
  stats_.waited_seconds += absl::ToDoubleSeconds(absl::Now() - begin);
  if (absl::IsDeadlineExceeded(result)) return result;
  moved->transfer.reset();
  moved->doing = Doing::kNothing;
  if (!writes) return ReadIsOver(moved, result);
  WriteIsOver(moved, result);
  return result;
}

absl::Status TensorTransfers::FinishWrite(MovedTensor& moved,
                                          absl::Time deadline) {
  if (moved.stage != nullptr) {
    FSDP_RETURN_IF_ERROR(FinishDown(moved, deadline));
    if (moved.direct) return absl::OkStatus();
    if (!moved.wanted && moved.up == nullptr) DropPacked(moved);
    if (moved.transfer == nullptr) {
      FSDP_RETURN_IF_ERROR(GiveToStore(moved, deadline));
    }
  }
  return moved.transfer->Wait(deadline);
}

void TensorTransfers::WriteIsOver(const MovedTensorPtr& moved,
                                  const absl::Status& result) {
  LeaveWriting(moved);
  if (result.ok()) {
    ++stats_.tensors_out;
    stats_.bytes_out += moved->form.bytes();
  } else {
    Failed(Annotate(result, What("write", *moved)));
  }
  if (moved->abandoned || !result.ok()) Erase(*moved);
  if (moved->abandoned) {
    Forget(moved);
  } else if (moved->wanted && result.ok()) {
    JoinReading(moved);
    if (!moved->direct) DropHost(*moved);
  } else {
    Drop(moved);
  }
}

absl::Status TensorTransfers::ReadIsOver(const MovedTensorPtr& moved,
                                         absl::Status result) {
  if (result.ok()) stats_.bytes_in += moved->form.bytes();
  if (moved->abandoned) {
    Erase(*moved);
    Forget(moved);
    return result;
  }
  if (result.ok() && moved->stage != nullptr) result = StartUp(*moved);
  if (!result.ok()) Forget(moved);
  return result;
}

// A device's copies end in the order of their start, so that the first one that
// is under way answers for those behind it.
void TensorTransfers::Poll() {
  const DeviceStage* behind = nullptr;
  for (const std::vector<MovedTensorPtr>& list : {writing_, reading_}) {
    for (const MovedTensorPtr& moved : list) {
      if (moved->doing == Doing::kNothing) continue;
      if (moved->down != nullptr && moved->stage == behind) continue;
      // Whoever needs the tensor gets the error.
      Settle(moved, absl::InfinitePast()).IgnoreError();
      if (moved->IsBeingWritten() && moved->down != nullptr) {
        behind = moved->stage;
      }
    }
  }
  for (const auto& stage : stages_) stage->Poll();
}

void TensorTransfers::Keep(const MovedTensorPtr& moved) {
  if (moved->IsBeingWritten()) moved->wanted = true;
}

void TensorTransfers::Drop(const MovedTensorPtr& moved) {
  moved->wanted = false;
  if (!moved->CanDrop()) return;
  LeaveReading(moved);
  DropPacked(*moved);
  if (moved->in_store && !moved->direct && moved->doing == Doing::kNothing) {
    DropHost(*moved);
  }
}

void TensorTransfers::Abandon(const MovedTensorPtr& moved) {
  moved->abandoned = true;
  if (moved->transfer != nullptr) return;
  if (moved->IsBeingWritten()) {
    moved->doing = Doing::kNothing;
    LeaveWriting(moved);
  }
  Erase(*moved);
  Forget(moved);
}

void TensorTransfers::Forget(const MovedTensorPtr& moved) {
  LeaveReading(moved);
  DropPacked(*moved);
  DropHost(*moved);
}

void TensorTransfers::DropPacked(MovedTensor& moved) {
  if (!moved.packed.defined()) return;
  at::Tensor packed = std::exchange(moved.packed, at::Tensor());
  if (moved.stage == nullptr) moved.host.reset();
  if (std::exchange(moved.unordered, false)) {
    moved.stage->Keep(std::move(packed), moved.LastCopy());
  } else {
    dropped_.push_back(std::move(packed));
  }
}

void TensorTransfers::LeaveWriting(const MovedTensorPtr& moved) {
  FSDP_CHECK(Remove(writing_, moved));
  writing_bytes_ -= moved->form.bytes();
  writes_hang_ = false;
}

void TensorTransfers::JoinReading(const MovedTensorPtr& moved) {
  if (std::find(reading_.begin(), reading_.end(), moved) != reading_.end()) {
    return;
  }
  reading_.push_back(moved);
  reading_bytes_ += moved->form.bytes();
}

void TensorTransfers::LeaveReading(const MovedTensorPtr& moved) {
  if (Remove(reading_, moved)) reading_bytes_ -= moved->form.bytes();
}

void TensorTransfers::Erase(MovedTensor& moved) {
  if (!std::exchange(moved.in_store, false)) return;
  const absl::Status erased = store_->Erase(moved.region);
  if (!erased.ok()) Failed(erased);
}

void TensorTransfers::Failed(const absl::Status& status) {
  ++stats_.failed;
  if (failure_.ok()) failure_ = status;
}

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
    // Tensor::is_pinned() would ask the device that LibTorch finds first.
    const auto& hooks = at::globalContext().getAcceleratorHooksInterface(
        moved.stage->device().type());
    if (hooks.isPinnedPtr(memory.data())) {
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
  absl::Status copied = AwaitCopy(moved.down, deadline);
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
  absl::Status started = ReadFromStore(moved);
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
