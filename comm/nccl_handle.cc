#include "comm/nccl_handle.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "comm/nccl_status.h"

namespace fsdp::comm {
namespace {

absl::Status AbortedHandle(absl::string_view what) {
  return absl::AbortedError(
      absl::StrCat(what, ": the NCCL communicator has been aborted"));
}

// NCCL keeps the text of its last error by thread.
std::string LastError(ncclComm_t comm) {
  const char* text = ncclGetLastError(comm);
  return text == nullptr ? "" : text;
}

}  // namespace

absl::StatusOr<std::unique_ptr<NcclHandle>> NcclHandle::Connect(
    const ncclUniqueId& id, int rank, int world_size, absl::Time deadline) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr;
  const ncclResult_t result =
      ncclCommInitRankConfig(&comm, world_size, id, rank, &config);
  std::unique_ptr<NcclHandle> handle(new NcclHandle(comm));
  const std::string what =
      absl::StrCat("join an NCCL group as rank ", rank, " of ", world_size);
  FSDP_RETURN_IF_ERROR(handle->Settle(what, result, deadline));
  return handle;
}

NcclHandle::~NcclHandle() { Abort(); }

absl::StatusOr<std::unique_ptr<NcclHandle>> NcclHandle::Split(
    int color, int key, absl::Time deadline) {
  ncclComm_t part = nullptr;
  const absl::Status split =
      Call("split an NCCL group", deadline, [&](ncclComm_t comm) {
        return ncclCommSplit(comm, color, key, &part, /*config=*/nullptr);
      });
  std::unique_ptr<NcclHandle> handle(new NcclHandle(part));
  FSDP_RETURN_IF_ERROR(split);
  FSDP_RETURN_IF_ERROR(
      handle->Settle("split an NCCL group", ncclInProgress, deadline));
  return handle;
}

absl::StatusOr<int> NcclHandle::Rank() const {
  absl::MutexLock lock(&mutex_);
  int rank = 0;
  if (comm_ == nullptr) return AbortedHandle("ask for a rank");
  FSDP_RETURN_IF_ERROR(
      NcclToStatus(ncclCommUserRank(comm_, &rank), "ask for a rank"));
  return rank;
}

absl::StatusOr<int> NcclHandle::Size() const {
  absl::MutexLock lock(&mutex_);
  int size = 0;
  if (comm_ == nullptr) return AbortedHandle("ask for a size");
  FSDP_RETURN_IF_ERROR(
      NcclToStatus(ncclCommCount(comm_, &size), "ask for a size"));
  return size;
}

absl::Status NcclHandle::Call(
    absl::string_view what, absl::Time deadline,
    absl::FunctionRef<ncclResult_t(ncclComm_t)> call) {
  ncclResult_t result = ncclSuccess;
  {
    absl::MutexLock lock(&mutex_);
    if (comm_ == nullptr) return AbortedHandle(what);
    result = call(comm_);
  }
  return Settle(what, result, deadline);
}

absl::Status NcclHandle::Settle(absl::string_view what, ncclResult_t result,
                                absl::Time deadline) {
  absl::Duration pause = absl::Microseconds(5);
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (comm_ == nullptr) {
        return result == ncclSuccess || result == ncclInProgress
                   ? AbortedHandle(what)
                   : NcclToStatus(result, what, LastError(nullptr));
      }
      if (result == ncclInProgress) {
        FSDP_RETURN_IF_ERROR(
            NcclToStatus(ncclCommGetAsyncError(comm_, &result), what));
      }
      const bool is_late = absl::Now() >= deadline;
      if (result != ncclInProgress || is_late) {
        return NcclToStatus(result, what, LastError(comm_));
      }
    }
    absl::SleepFor(pause);
    pause = std::min(pause * 2, absl::Milliseconds(1));
  }
}

absl::Status NcclHandle::Health() {
  absl::MutexLock lock(&mutex_);
  if (comm_ == nullptr) return absl::OkStatus();
  ncclResult_t result = ncclSuccess;
  FSDP_RETURN_IF_ERROR(
      NcclToStatus(ncclCommGetAsyncError(comm_, &result), "look after NCCL"));
  if (result == ncclInProgress) return absl::OkStatus();
  return NcclToStatus(result, "an operation on the device", LastError(comm_));
}

void NcclHandle::Abort() {
  absl::MutexLock lock(&mutex_);
  if (comm_ == nullptr) return;
  // What it says is of no use to anyone: the communicator is gone either way.
  static_cast<void>(ncclCommAbort(comm_));
  comm_ = nullptr;
}

void NcclHandle::Close(absl::Time deadline) {
  const absl::Status finalized =
      Call("leave an NCCL group", deadline, ncclCommFinalize);
  if (!finalized.ok()) return Abort();
  absl::MutexLock lock(&mutex_);
  if (comm_ == nullptr) return;
  static_cast<void>(ncclCommDestroy(comm_));
  comm_ = nullptr;
}

}  // namespace fsdp::comm
