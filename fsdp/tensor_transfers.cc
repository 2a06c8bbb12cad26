#include "fsdp/tensor_transfers.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "base/torch_status.h"

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

TensorTransfers::TensorTransfers(std::unique_ptr<offload::ParamStore> store,
                                 int64_t window_bytes, absl::Duration timeout)
    : store_(std::move(store)),
      window_bytes_(window_bytes),
      timeout_(timeout) {}

// Transfers wait for their end, before their memory and the store go.
TensorTransfers::~TensorTransfers() {
  writing_.clear();
  reading_.clear();
}

MovedTensorPtr TensorTransfers::Write(const at::Tensor& tensor,
                                      const PackedForm& form,
                                      std::string region) {
  auto moved = std::make_shared<MovedTensor>(form, std::move(region));
  if (!MakeRoomToWrite(*moved) || !Create(*moved)) return nullptr;
  const absl::Status started = StartWrite(*moved, tensor);
  if (!started.ok()) {
    Erase(*moved);
    Failed(started);
    return nullptr;
  }
  writing_.push_back(moved);
  writing_bytes_ += form.bytes();
  return moved;
}

// A store that hangs holds up one caller, and not each of them.
bool TensorTransfers::MakeRoomToWrite(const MovedTensor& moved) {
  while (!writing_.empty() &&
         writing_bytes_ + moved.form.bytes() > window_bytes_) {
    const MovedTensorPtr oldest = writing_.front();
    const absl::Status settled = Settle(
        oldest, writes_hang_ ? absl::InfinitePast() : absl::Now() + timeout_);
    if (!absl::IsDeadlineExceeded(settled)) continue;
    writes_hang_ = true;
    Failed(Annotate(settled, What("write", *oldest)));
    return false;
  }
  return true;
}

bool TensorTransfers::Create(MovedTensor& moved) {
  const absl::Status created = store_->Create(moved.region, moved.form.bytes());
  moved.in_store = created.ok();
  if (absl::IsResourceExhausted(created)) {
    ++stats_.full;
  } else if (!created.ok()) {
    Failed(created);
  }
  return created.ok();
}

absl::Status TensorTransfers::StartWrite(MovedTensor& moved,
                                         const at::Tensor& tensor) {
  const std::string what = What("write", moved);
  FSDP_RETURN_IF_ERROR(
      TorchToStatus(what, [&] { moved.packed = moved.form.Pack(tensor); }));
  auto started = store_->Write(
      moved.region, 0,
      absl::MakeSpan(static_cast<const char*>(moved.packed.const_data_ptr()),
                     moved.form.bytes()));
  if (!started.ok()) return Annotate(started.status(), what);
  moved.transfer = *std::move(started);
  moved.writes = true;
  return absl::OkStatus();
}

absl::Status TensorTransfers::StartRead(const MovedTensorPtr& moved,
                                        bool ahead) {
  if (moved->packed.defined()) return absl::OkStatus();
  const std::string what = What("read", *moved);
  at::Tensor packed;
  FSDP_RETURN_IF_ERROR(
      TorchToStatus(what, [&] { packed = moved->form.Allocate(); }));
  auto started =
      store_->Read(moved->region, 0,
                   absl::MakeSpan(static_cast<char*>(packed.mutable_data_ptr()),
                                  moved->form.bytes()));
  if (!started.ok()) return Annotate(started.status(), what);
  moved->packed = std::move(packed);
  moved->transfer = *std::move(started);
  moved->writes = false;
  moved->ahead = ahead;
  JoinReading(moved);
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
  if (moved->transfer == nullptr || moved->writes) return absl::OkStatus();
  return Settle(moved, absl::Now() + timeout_);
}

absl::Status TensorTransfers::Settle(const MovedTensorPtr& moved,
                                     absl::Time deadline) {
  const absl::Time begin = absl::Now();
  const absl::Status result = moved->transfer->Wait(deadline);
  stats_.waited_seconds += absl::ToDoubleSeconds(absl::Now() - begin);
  if (absl::IsDeadlineExceeded(result)) return result;
  moved->transfer.reset();
  if (moved->writes) {
    WriteIsOver(moved, result);
  } else {
    ReadIsOver(moved, result);
  }
  return result;
}

void TensorTransfers::WriteIsOver(const MovedTensorPtr& moved,
                                  const absl::Status& result) {
  FSDP_CHECK(Remove(writing_, moved));
  writing_bytes_ -= moved->form.bytes();
  writes_hang_ = false;
  if (result.ok()) {
    ++stats_.tensors_out;
    stats_.bytes_out += moved->form.bytes();
  } else {
    Failed(Annotate(result, What("write", *moved)));
  }
  if (moved->abandoned || !result.ok()) Erase(*moved);
  if (moved->abandoned) {
    dropped_.push_back(std::exchange(moved->packed, at::Tensor()));
  } else if (moved->wanted && result.ok()) {
    JoinReading(moved);
  } else {
    Drop(moved);
  }
}

void TensorTransfers::ReadIsOver(const MovedTensorPtr& moved,
                                 const absl::Status& result) {
  if (result.ok()) stats_.bytes_in += moved->form.bytes();
  if (moved->abandoned) Erase(*moved);
  if (moved->abandoned || !result.ok()) {
    LeaveReading(moved);
    dropped_.push_back(std::exchange(moved->packed, at::Tensor()));
  }
}

void TensorTransfers::Poll() {
  for (const std::vector<MovedTensorPtr>& list : {writing_, reading_}) {
    for (const MovedTensorPtr& moved : list) {
      if (moved->transfer == nullptr) continue;
      // What is reported of it is reported by whoever needs the tensor.
      Settle(moved, absl::InfinitePast()).IgnoreError();
    }
  }
}

void TensorTransfers::Keep(const MovedTensorPtr& moved) {
  if (moved->transfer != nullptr && moved->writes) moved->wanted = true;
}

void TensorTransfers::Drop(const MovedTensorPtr& moved) {
  moved->wanted = false;
  if (!moved->in_store || moved->transfer != nullptr) return;
  LeaveReading(moved);
  dropped_.push_back(std::exchange(moved->packed, at::Tensor()));
}

void TensorTransfers::Abandon(const MovedTensorPtr& moved) {
  moved->abandoned = true;
  if (moved->transfer != nullptr) return;
  Erase(*moved);
  LeaveReading(moved);
  dropped_.push_back(std::exchange(moved->packed, at::Tensor()));
}

void TensorTransfers::JoinReading(const MovedTensorPtr& moved) {
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

}  // namespace fsdp
