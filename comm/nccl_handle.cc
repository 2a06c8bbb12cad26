#include "comm/nccl_handle.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/cuda_status.h"
#include "base/status_macros.h"
#include "comm/call_in_time.h"
#include "comm/nccl_status.h"

namespace fsdp::comm {
namespace {

// NCCL's thread needs about 20 us to start an operation: less than a sleep
// takes.
constexpr int kEagerPolls = 1000;
constexpr absl::Duration kFirstPause = absl::Microseconds(20);
constexpr absl::Duration kLongestPause = absl::Milliseconds(1);

// How long an abort may take.
constexpr absl::Duration kAbortTimeout = absl::Seconds(10);

absl::Status AbortedHandle(absl::string_view what) {
  return absl::AbortedError(
      absl::StrCat(what, ": the NCCL communicator has been aborted"));
}

// Of the whole process: what it says of others' errors is better than nothing.
std::string LastError(ncclComm_t comm) {
  const char* text = ncclGetLastError(comm);
  return text == nullptr ? "" : text;
}

// Both ways to end a communicator wait for NCCL's threads, which wait for the
// peers on this host, and go back to the device that was the current one.
void EndInTime(ncclComm_t comm, int device, ncclResult_t (*end)(ncclComm_t),
               absl::Time deadline) {
  const auto call = [comm, device, end] {
    // What either says is of no use to anyone: the communicator is gone.
    static_cast<void>(cudaSetDevice(device));
    static_cast<void>(end(comm));
  };
  static_cast<void>(CallInTime(call, deadline));
}

}  // namespace

absl::StatusOr<std::unique_ptr<NcclHandle>> NcclHandle::Connect(
    const ncclUniqueId& id, int rank, int world_size, absl::Time deadline) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  int device = 0;
  FSDP_RETURN_IF_ERROR(
      CudaToStatus(cudaGetDevice(&device), "ask for the current GPU"));
  ncclComm_t comm = nullptr;
  const ncclResult_t result =
      ncclCommInitRankConfig(&comm, world_size, id, rank, &config);
  std::unique_ptr<NcclHandle> handle(new NcclHandle(comm, device));
  const std::string what =
      absl::StrCat("join an NCCL group as rank ", rank, " of ", world_size);
  FSDP_RETURN_IF_ERROR(handle->Settle(what, result, deadline));
  return handle;
}

NcclHandle::~NcclHandle() {
  Abort();
  // Of a split that has come to an end after all.
  if (part_ != nullptr) {
    EndInTime(part_, device_, ncclCommAbort, absl::Now() + kAbortTimeout);
  }
}

absl::StatusOr<std::unique_ptr<NcclHandle>> NcclHandle::Split(
    int color, int key, absl::Time deadline) {
  constexpr char kWhat[] = "split an NCCL group";
  FSDP_RETURN_IF_ERROR(Call(kWhat, deadline, [&](ncclComm_t comm) {
    return ncclCommSplit(comm, color, key, &part_, /*config=*/nullptr);
  }));
  std::unique_ptr<NcclHandle> handle(
      new NcclHandle(std::exchange(part_, nullptr), device_));
  FSDP_RETURN_IF_ERROR(handle->Settle(kWhat, ncclInProgress, deadline));
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
  const auto is_free = [this] {
    mutex_.AssertHeld();
    return !calling_;
  };
  ncclResult_t result = ncclSuccess;
  {
    absl::MutexLock lock(&mutex_);
    // NCCL refuses a call while another one is in progress.
    if (!mutex_.AwaitWithDeadline(absl::Condition(&is_free), deadline)) {
      return NcclToStatus(ncclInProgress, what, "another call");
    }
    if (comm_ == nullptr) return AbortedHandle(what);
    result = call(comm_);
    calling_ = true;
  }
  // ncclCommSplit() and ncclCommWindowRegister() say so when they have only
  // begun.
  if (result == ncclSuccess) result = ncclInProgress;
  const absl::Status status = Settle(what, result, deadline);
  absl::MutexLock lock(&mutex_);
  calling_ = false;
  return status;
}

absl::Status NcclHandle::Settle(absl::string_view what, ncclResult_t result,
                                absl::Time deadline) {
  absl::Duration pause = kFirstPause;
  for (int polls = 0;; ++polls) {
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
    if (polls < kEagerPolls) {
      std::this_thread::yield();
      continue;
    }
    absl::SleepFor(pause);
    pause = std::min(pause * 2, kLongestPause);
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

void NcclHandle::Abort() { End(ncclCommAbort, absl::Now() + kAbortTimeout); }

void NcclHandle::Close(absl::Time deadline) {
  const absl::Status finalized =
      Call("leave an NCCL group", deadline, ncclCommFinalize);
  if (!finalized.ok()) return Abort();
  End(ncclCommDestroy, deadline);
}

void NcclHandle::End(ncclResult_t (*end)(ncclComm_t), absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  if (comm_ == nullptr) return;
  EndInTime(comm_, device_, end, deadline);
  comm_ = nullptr;
}

}  // namespace fsdp::comm
