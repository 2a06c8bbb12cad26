#include "fsdp/memory/device_copies.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "device_ops/page_lock.h"

namespace fsdp {
namespace {

at::Tensor FirstOf(const at::Tensor& memory, const at::Tensor& host) {
  return memory.narrow(0, 0, host.numel());
}

}  // namespace

absl::StatusOr<char*> LockedPages::Allocate(int64_t bytes) {
  FSDP_ASSIGN_OR_RETURN(char* const memory, System().Allocate(bytes));
  bool locked = false;
  const absl::Status status = TorchToStatus("lock pages", [&] {
    locked = device_ops::LockPages(memory, bytes, device_);
  });
  if (!status.ok()) {
    System().Free(memory, bytes);
    return absl::ResourceExhaustedError(
        absl::StrCat("allocate ", bytes, " bytes of memory that ",
                     device_.str(), " can copy: ", status.message()));
  }
  const absl::MutexLock lock(&mutex_);
  if (locked) {
    locked_.insert(memory);
  } else {
    all_locked_ = false;
  }
  return memory;
}

void LockedPages::Free(char* memory, int64_t bytes) {
  bool locked;
  {
    const absl::MutexLock lock(&mutex_);
    locked = locked_.erase(memory) > 0;
  }
  if (locked) {
    // This fails if the device is lost; its locks are lost with it.
    const absl::Status unlocked = TorchToStatus("unlock pages", [&] {
      device_ops::UnlockPages(memory, bytes, device_);
    });
    if (!unlocked.ok()) {
      TORCH_WARN("fsdp: ", unlocked.ToString());
    }
  }
  System().Free(memory, bytes);
}

bool LockedPages::locked() const {
  const absl::MutexLock lock(&mutex_);
  return all_locked_;
}

absl::Status AwaitCopy(const SharedEvent& event, absl::Time deadline) {
  if (event == nullptr) return absl::OkStatus();
  return TorchToStatus("waiting for a copy of the device", [&] {
    if (event->Wait(deadline)) return absl::OkStatus();
    return absl::DeadlineExceededError(
        absl::StrCat(event->device().str(),
                     " has not come to the end of a copy in time: it hangs, or "
                     "has more to do"));
  });
}

DeviceCopies::DeviceCopies(c10::Device device, int64_t room,
                           absl::Duration timeout)
    : device_(device),
      timeout_(timeout),
      up_(device),
      down_(device),
      memory_(
          [device](int64_t bytes) -> absl::StatusOr<at::Tensor> {
            at::Tensor memory;
            FSDP_RETURN_IF_ERROR(
                TorchToStatus("allocating memory for copies", [&] {
                  memory = at::empty(
                      {bytes}, at::TensorOptions(at::kByte).device(device));
                }));
            return memory;
          },
          room) {}

// Memory goes back to the stream that allocated it, so that stream must follow
// what the others have been given.
DeviceCopies::~DeviceCopies() {
  const absl::Status ended = TorchToStatus("ending copies", [&] {
    down_.BlockCurrentStream();
    up_.FollowCurrentStream();
    const SideStream::Scope beside(up_);
    auto last = std::make_shared<DeviceEvent>();
    last->Record(device_);
    return Await(last);
  });
  if (!ended.ok()) {
    TORCH_WARN("fsdp: ", ended.ToString());
  }
}

absl::StatusOr<at::Tensor> DeviceCopies::Acquire(int64_t bytes) {
  const SideStream::Scope beside(up_);
  return memory_.Acquire(bytes);
}

absl::StatusOr<SharedEvent> DeviceCopies::Upload(
    const at::Tensor& memory, const at::Tensor& host, bool copies,
    const SharedEvent& host_ready) {
  auto arrived = std::make_shared<DeviceEvent>();
  FSDP_RETURN_IF_ERROR(TorchToStatus("copying to the device", [&] {
    const c10::NoGradGuard no_grad;
    const SideStream::Scope beside(up_);
    if (host_ready != nullptr) host_ready->BlockCurrentStream();
    if (copies) FirstOf(memory, host).copy_(host, /*non_blocking=*/true);
    arrived->Record(device_);
  }));
  return arrived;
}

absl::StatusOr<SharedEvent> DeviceCopies::Release(const at::Tensor& memory,
                                                  const at::Tensor& host,
                                                  bool copies) {
  auto done = std::make_shared<DeviceEvent>();
  FSDP_RETURN_IF_ERROR(TorchToStatus("copying from the device", [&] {
    const c10::NoGradGuard no_grad;
    down_.FollowCurrentStream();
    const SideStream::Scope beside(down_);
    if (copies) host.copy_(FirstOf(memory, host), /*non_blocking=*/true);
    done->Record(device_);
    DeviceEvent used;
    used.Record(device_);
    memory_.Release(memory, /*reader=*/nullptr, std::move(used));
  }));
  return done;
}

}  // namespace fsdp
