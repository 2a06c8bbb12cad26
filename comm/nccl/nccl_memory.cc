#include "comm/nccl/nccl_memory.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nccl.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/group/connect_together.h"
#include "comm/nccl/nccl_handle.h"

namespace fsdp::comm {
namespace {

constexpr int kFirstVersionWithWindows = NCCL_VERSION(2, 27, 0);
constexpr int kFirstVersionThatAborts = NCCL_VERSION(2, 29, 7);

// The longest time that the memory of a failed group may be in use.
constexpr absl::Duration kFailedTimeout = absl::Seconds(5);

using RegisterFunction = decltype(&ncclCommWindowRegister);
using DeregisterFunction = decltype(&ncclCommWindowDeregister);

// Finds a function by name, since older libraries lack some.
template <typename Function>
Function Find(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

bool HasVersion(int least) {
  int version = 0;
  return ncclGetVersion(&version) == ncclSuccess && version >= least;
}

// Frees memory of the current device. A call fails here only if the group or
// the device has failed, which other calls report.
void Free(NcclGroup& group, void* data, ncclWindow_t window) {
  static_cast<void>(cudaDeviceSynchronize());  // kernels may be reading it
  if (window != nullptr) {
    const auto deregister =
        Find<DeregisterFunction>("ncclCommWindowDeregister");
    group.handle()
        .Call("deregister a window", absl::Now() + group.timeout(),
              [=](ncclComm_t comm) { return deregister(comm, window); })
        .IgnoreError();
  }
  static_cast<void>(ncclMemFree(data));
}

}  // namespace

bool HasNcclWindows() {
  return HasVersion(kFirstVersionWithWindows) &&
         Find<RegisterFunction>("ncclCommWindowRegister") != nullptr &&
         Find<DeregisterFunction>("ncclCommWindowDeregister") != nullptr;
}

bool HasAbortableNcclWindows() {
  return HasNcclWindows() && HasVersion(kFirstVersionThatAborts);
}

NcclMemory::NcclMemory(std::shared_ptr<NcclGroup> group, void* data,
                       int64_t bytes)
    : group_(std::move(group)),
      data_(data),
      bytes_(bytes),
      window_(std::make_shared<ncclWindow_t>(nullptr)) {}

absl::StatusOr<std::shared_ptr<NcclMemory>> NcclMemory::Allocate(
    std::shared_ptr<NcclGroup> group, int64_t bytes) {
  void* data = nullptr;
  absl::Status status;
  FSDP_RETURN_IF_ERROR(TorchToStatus("allocate for NCCL", [&] {
    const c10::DeviceGuard guard(group->device());
    status = NcclToStatus(ncclMemAlloc(&data, static_cast<size_t>(bytes)),
                          absl::StrCat("allocate ", bytes, " bytes for NCCL"));
  }));
  if (!status.ok()) {
    static_cast<void>(cudaGetLastError());  // clears the error
    return absl::ResourceExhaustedError(status.message());
  }
  return std::shared_ptr<NcclMemory>(
      new NcclMemory(std::move(group), data, bytes));
}

// Has a time limit, since the thread that watches the group may call this.
NcclMemory::~NcclMemory() {
  const auto free = [group = group_, data = data_, window = window_] {
    static_cast<void>(cudaSetDevice(group->device().index()));
    Free(*group, data, *window);
  };
  const absl::Duration patience =
      group_->failed() ? kFailedTimeout : group_->timeout();
  static_cast<void>(CallInTime(free, absl::Now() + patience));
}

absl::Status NcclMemory::Register(bool is_symmetric) {
  const auto register_window = Find<RegisterFunction>("ncclCommWindowRegister");
  const int flags = is_symmetric ? NCCL_WIN_COLL_SYMMETRIC : NCCL_WIN_DEFAULT;
  return group_->handle().Call(
      absl::StrCat("register ", bytes_, " bytes as a window"),
      absl::Now() + group_->timeout(),
      [register_window, data = data_, bytes = bytes_, window = window_,
       flags](ncclComm_t comm) {
        return register_window(comm, data, static_cast<size_t>(bytes),
                               window.get(), flags);
      });
}

at::Tensor NcclMemory::AsTensor(const std::shared_ptr<NcclMemory>& memory) {
  return at::for_blob(memory->data_, {memory->bytes_})
      .deleter([memory](void* /*data*/) {})
      .options(
          at::TensorOptions().dtype(at::kByte).device(memory->group_->device()))
      .target_device(memory->group_->device())
      .make_tensor();
}

absl::StatusOr<WindowOutcome> AgreeOnWindow(const WindowSteps& steps) {
  FSDP_ASSIGN_OR_RETURN(const bool is_allocated,
                        steps.true_on_all(steps.allocate().ok()));
  if (!is_allocated) return WindowOutcome::kNoMemory;
  absl::Status registered = steps.register_window();
  // The other ranks may still be in register_window().
  if (absl::IsAborted(registered) || absl::IsDeadlineExceeded(registered)) {
    return registered;
  }
  FSDP_ASSIGN_OR_RETURN(const bool is_registered,
                        steps.true_on_all(registered.ok()));
  return is_registered ? WindowOutcome::kWindow : WindowOutcome::kRefused;
}

}  // namespace fsdp::comm
