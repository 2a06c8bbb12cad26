// Host memory that a device copies from and to while the host goes on.
#ifndef FSDP_MEMORY_LOCKED_PAGES_H_
#define FSDP_MEMORY_LOCKED_PAGES_H_

#include <c10/core/Device.h>

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "offload/page_memory.h"

namespace fsdp {

// Allocates page-locked memory for stores whose data moves to and from
// `device`, such as HostStore::Make(capacity, pages). If nothing linked can
// lock pages for the device (//device_ops/cuda can for CUDA), the pages are
// ordinary ones: copies take longer and the host waits for them.
class LockedPages : public offload::PageAllocator {
 public:
  explicit LockedPages(c10::Device device) : device_(device) {}

  // ResourceExhausted: there is no memory, or it cannot be locked.
  absl::StatusOr<char*> Allocate(int64_t bytes) override;
  // No copy from or to `memory` may be under way.
  void Free(char* memory, int64_t bytes) override;

  // Returns whether everything that was allocated was locked.
  bool locked() const;

 private:
  const c10::Device device_;
  mutable absl::Mutex mutex_;
  bool all_locked_ ABSL_GUARDED_BY(mutex_) = true;
  absl::flat_hash_set<const char*> locked_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace fsdp

#endif  // FSDP_MEMORY_LOCKED_PAGES_H_
