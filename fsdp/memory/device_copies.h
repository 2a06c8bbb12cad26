// Copies between the host and a device while the device computes, as
// ZeRO-Offload does (Ren et al., 2021): on one stream up and one stream down.
// The host does not wait for them if its memory is page-locked.
#ifndef FSDP_MEMORY_DEVICE_COPIES_H_
#define FSDP_MEMORY_DEVICE_COPIES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/device_streams.h"
#include "fsdp/memory/buffer_pool.h"
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

// Makes the host wait for `event`, the end of a copy; null: there is none.
// DeadlineExceeded. Other errors mean that the device has failed.
absl::Status AwaitCopy(const SharedEvent& event, absl::Time deadline);

// Copies by way of the device's memory, which it reuses. It has as much as was
// in use at once, or `room` bytes if that is more. With less than twice as much
// as is in use, copies up wait for copies down. If the host's memory is not
// page-locked, the host waits for copies. Not thread-safe.
class DeviceCopies {
 public:
  // `timeout` limits the host's waits.
  DeviceCopies(c10::Device device, int64_t room, absl::Duration timeout);
  // Waits for the copies under way, so that the host's memory may go.
  ~DeviceCopies();

  // Returns at least `bytes` of the device's memory, of any content, for
  // Upload().
  absl::StatusOr<at::Tensor> Acquire(int64_t bytes);
  // Copies `host` into `memory` after `host_ready`, which may be null. When the
  // returned event is reached, the copy and earlier uses of the memory are
  // over. Without `copies` nothing is copied, and only the latter holds. After
  // an error the device is lost.
  absl::StatusOr<SharedEvent> Upload(const at::Tensor& memory,
                                     const at::Tensor& host, bool copies,
                                     const SharedEvent& host_ready);
  // Takes back memory from Acquire() when the current stream has done its
  // present work. With `copies` its bytes are copied to `host` first. `host`
  // is free when the returned event is reached.
  absl::StatusOr<SharedEvent> Release(const at::Tensor& memory,
                                      const at::Tensor& host, bool copies);

  // Calls AwaitCopy().
  absl::Status Await(const SharedEvent& event) const {
    return AwaitCopy(event, absl::Now() + timeout_);
  }

 private:
  const c10::Device device_;
  const absl::Duration timeout_;
  SideStream up_;
  SideStream down_;
  BufferPool memory_;
};

}  // namespace fsdp

#endif  // FSDP_MEMORY_DEVICE_COPIES_H_
