// Memory of the host that a device copies from and to while both go on.
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

// For stores whose memory moves to and from `device`, such as
// HostStore::Make(capacity, pages). Where nothing linked can lock pages for the
// device (//device_ops/cuda can for CUDA), they are ordinary ones, of which
// copies take longer and the host waits for them.
class LockedPages : public offload::PageAllocator {
 public:
  explicit LockedPages(c10::Device device) : device_(device) {}

  // ResourceExhausted also for memory that the machine has and cannot lock.
  absl::StatusOr<char*> Allocate(int64_t bytes) override;
  // No copy of a device is under way.
  void Free(char* memory, int64_t bytes) override;

  // Whether what is allocated, if anything, is locked.
  bool locked() const;

 private:
  const c10::Device device_;
  mutable absl::Mutex mutex_;
  bool all_locked_ ABSL_GUARDED_BY(mutex_) = true;
  absl::flat_hash_set<const char*> locked_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace fsdp

#endif  // FSDP_MEMORY_LOCKED_PAGES_H_
