#include "fsdp/memory/locked_pages.h"

#include <c10/util/Exception.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "device_ops/page_lock.h"

namespace fsdp {

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

}  // namespace fsdp
