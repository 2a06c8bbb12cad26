#include "comm/nccl/nccl_handle.h"

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/cuda_status.h"
#include "base/status_macros.h"
#include "comm/group/connect_together.h"

namespace fsdp::comm {
namespace {

constexpr absl::Duration kAbortTimeout = absl::Seconds(10);

// Returns the process's last error: even another group's is better than none.
std::string LastError() {
  const char* text = ncclGetLastError(nullptr);
  return text == nullptr ? "" : text;
}

struct Meaning {
  absl::StatusCode code;
  absl::string_view advice;
};

Meaning MeaningOf(ncclResult_t result) {
  switch (result) {
    case ncclRemoteError:
      return {absl::StatusCode::kUnavailable,
              "a peer has failed or is gone; its own error says why"};
    case ncclSystemError:
      return {absl::StatusCode::kUnavailable,
              "a socket, a file or shared memory failed, often because a peer "
              "is gone or the network is not reachable; see NCCL_SOCKET_IFNAME "
              "and NCCL_DEBUG=WARN"};
    case ncclInvalidArgument:
      return {absl::StatusCode::kInvalidArgument,
              "NCCL_DEBUG=WARN says which argument"};
    case ncclInvalidUsage:
      return {absl::StatusCode::kInvalidArgument,
              "two ranks on one GPU, perhaps; each rank needs its own"};
    case ncclInProgress:
      return {absl::StatusCode::kDeadlineExceeded,
              "not done in time; a rank is missing, or the network is not "
              "reachable (NCCL_SOCKET_IFNAME)"};
    case ncclUnhandledCudaError:
      return {absl::StatusCode::kInternal,
              "an earlier kernel or a full GPU may have caused it; "
              "NCCL_DEBUG=WARN says which call"};
    default:
      return {absl::StatusCode::kInternal, "NCCL_DEBUG=WARN says more"};
  }
}

}  // namespace

// The communicator, for one call at a time.
class NcclHandle::State : public std::enable_shared_from_this<State> {
 public:
  // Waits for the caller's turn, which lasts until the result is dropped.
  // Aborted: the communicator has ended.
  absl::StatusOr<std::shared_ptr<void>> Begin(absl::string_view what,
                                              absl::Time deadline) {
    const auto may_begin = [this] {
      mutex_.AssertHeld();
      return !calling_ || ended_;
    };
    absl::MutexLock lock(&mutex_);
    if (!mutex_.AwaitWithDeadline(absl::Condition(&may_begin), deadline)) {
      return NcclToStatus(ncclInProgress, what, "another call");
    }
    if (ended_) return Ended(what);
    calling_ = true;
    return std::shared_ptr<void>(this, [self = shared_from_this()](void*) {
      absl::MutexLock lock(&self->mutex_);
      self->calling_ = false;
    });
  }

  // For the call whose turn it is. NCCL writes to `made` early, while it is
  // still making the communicator: an abort of a call that hangs needs it.
  ncclComm_t comm() const { return __atomic_load_n(&comm_, __ATOMIC_ACQUIRE); }
  ncclComm_t* made() { return &comm_; }

  absl::Status Explain(absl::string_view what, ncclResult_t result) {
    absl::MutexLock lock(&mutex_);
    if (ended_) return Ended(what);
    return result == ncclSuccess ? absl::OkStatus()
                                 : NcclToStatus(result, what, LastError());
  }

  absl::Status Health() {
    absl::MutexLock lock(&mutex_);
    if (ended_ || comm() == nullptr) return absl::OkStatus();
    ncclResult_t result = ncclSuccess;
    FSDP_RETURN_IF_ERROR(NcclToStatus(ncclCommGetAsyncError(comm(), &result),
                                      "look after NCCL"));
    if (result == ncclInProgress) return absl::OkStatus();
    return NcclToStatus(result, "an operation on the device", LastError());
  }

  // Lets no further call begin. Returns the communicator to be ended, or
  // nullptr if there is none or others have been told.
  ncclComm_t End() {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(ended_, true)) return nullptr;
    return comm();
  }

  void AwaitReturned() {
    const auto has_returned = [this] {
      mutex_.AssertHeld();
      return !calling_;
    };
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&has_returned));
  }

 private:
  static absl::Status Ended(absl::string_view what) {
    return absl::AbortedError(
        absl::StrCat(what, ": the NCCL communicator has been aborted"));
  }

  absl::Mutex mutex_;
  ncclComm_t comm_ = nullptr;
  bool calling_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

NcclHandle::NcclHandle(int device)
    : device_(device), state_(std::make_shared<State>()) {}

NcclHandle::~NcclHandle() { Abort(); }

absl::StatusOr<std::unique_ptr<NcclHandle>> NcclHandle::Connect(
    const ncclUniqueId& id, int rank, int world_size, absl::Time deadline) {
  int device = 0;
  FSDP_RETURN_IF_ERROR(
      CudaToStatus(cudaGetDevice(&device), "ask for the current GPU"));
  std::unique_ptr<NcclHandle> handle(new NcclHandle(device));
  const std::string what =
      absl::StrCat("join an NCCL group as rank ", rank, " of ", world_size);
  FSDP_RETURN_IF_ERROR(
      handle->Run(what, deadline, [id, rank, world_size](State& state) {
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 1;
        return ncclCommInitRankConfig(state.made(), world_size, id, rank,
                                      &config);
      }));
  return handle;
}

absl::StatusOr<std::unique_ptr<NcclHandle>> NcclHandle::Split(
    int color, int key, absl::Time deadline) {
  std::unique_ptr<NcclHandle> part(new NcclHandle(device_));
  absl::Status status =
      Call("split an NCCL group", deadline,
           [made = part->state_, color, key](ncclComm_t comm) {
             return ncclCommSplit(comm, color, key, made->made(),
                                  /*config=*/nullptr);
           });
  if (status.ok()) return part;
  // Comes before the part, since it writes to the flags of an unfinished part.
  Abort();
  return status;
}

absl::Status NcclHandle::Enqueue(
    absl::string_view what, absl::FunctionRef<ncclResult_t(ncclComm_t)> call) {
  FSDP_ASSIGN_OR_RETURN(const auto turn,
                        state_->Begin(what, absl::InfiniteFuture()));
  return state_->Explain(what, call(state_->comm()));
}

absl::Status NcclHandle::Call(absl::string_view what, absl::Time deadline,
                              std::function<ncclResult_t(ncclComm_t)> call) {
  return Run(what, deadline, [call = std::move(call)](State& state) {
    return call(state.comm());
  });
}

absl::Status NcclHandle::Run(absl::string_view what, absl::Time deadline,
                             std::function<ncclResult_t(State&)> call) {
  FSDP_ASSIGN_OR_RETURN(auto turn, state_->Begin(what, deadline));
  const auto result = std::make_shared<absl::Status>();
  // The turn goes with the function, which may never be called.
  const bool is_over = CallInTime(
      [state = state_, turn = std::move(turn), call = std::move(call), result,
       device = device_, what = std::string(what)] {
        // If this fails, so does the call.
        static_cast<void>(cudaSetDevice(device));
        *result = state->Explain(what, call(*state));
      },
      deadline);
  if (is_over) return *result;
  Abort();
  return NcclToStatus(ncclInProgress, what, LastError());
}

absl::Status NcclHandle::Health() { return state_->Health(); }

void NcclHandle::Abort() { End(Ending::kAbort, absl::Now() + kAbortTimeout); }

void NcclHandle::Close(absl::Time deadline) {
  if (!Call("leave an NCCL group", deadline, ncclCommFinalize).ok()) {
    return Abort();
  }
  End(Ending::kDestroy, deadline);
}

// Ends the communicator. NCCL's calls for this wait for NCCL's threads, which
// wait for the peers on this host. Their results are of no use to anyone: the
// communicator is gone.
void NcclHandle::End(Ending ending, absl::Time deadline) {
  const absl::MutexLock lock(&ending_);
  ncclComm* const comm = state_->End();
  if (comm == nullptr) return;
  const auto end = [state = state_, comm, device = device_, ending] {
    static_cast<void>(cudaSetDevice(device));
    if (ending == Ending::kDestroy) {
      state->AwaitReturned();
      static_cast<void>(ncclCommDestroy(comm));
      return;
    }
    static_cast<void>(ncclGroupStart());
    static_cast<void>(ncclCommAbort(comm));
    state->AwaitReturned();
    static_cast<void>(ncclGroupEnd());
  };
  static_cast<void>(CallInTime(end, deadline));
}

absl::Status NcclToStatus(ncclResult_t result, absl::string_view what,
                          absl::string_view detail) {
  if (result == ncclSuccess) return absl::OkStatus();
  const Meaning meaning = MeaningOf(result);
  return absl::Status(
      meaning.code,
      absl::StrCat(what, ": NCCL says ", ncclGetErrorString(result),
                   detail.empty() ? "" : "; ", detail, ": ", meaning.advice));
}

ncclDataType_t NcclDtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::ScalarType::Float:
      return ncclFloat32;
    case at::ScalarType::Double:
      return ncclFloat64;
    case at::ScalarType::Half:
      return ncclFloat16;
    case at::ScalarType::BFloat16:
      return ncclBfloat16;
    case at::ScalarType::Int:
      return ncclInt32;
    case at::ScalarType::Long:
      return ncclInt64;
    default:
      FSDP_CHECK(dtype == at::ScalarType::Byte);
      return ncclUint8;
  }
}

ncclRedOp_t NcclReduction(ReduceOp op) {
  if (op == ReduceOp::kSum) return ncclSum;
  return op == ReduceOp::kMin ? ncclMin : ncclMax;
}

}  // namespace fsdp::comm
