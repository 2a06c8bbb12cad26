// Copies between the host and a device beside what the device computes, as
// ZeRO-Offload does (Ren et al., 2021): one stream up, one stream down.
#ifndef FSDP_MEMORY_DEVICE_COPIES_H_
#define FSDP_MEMORY_DEVICE_COPIES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/device_streams.h"
#include "fsdp/memory/buffer_pool.h"

namespace fsdp {

// Memory of the device is used again: there is as much as was in use at once,
// or `room`, if that is more. Copies up wait for copies down where there is
// less than twice as much. The host's memory has to be page-locked, or else the
// host waits. Not thread-safe.
class DeviceCopies {
 public:
  // `timeout`: of the host's waits.
  DeviceCopies(c10::Device device, int64_t room, absl::Duration timeout);
  // Lets the host wait for the copies that are under way: its memory may go.
  ~DeviceCopies();

  // Memory of the device, at least `bytes` of any content, for Upload().
  absl::StatusOr<at::Tensor> Acquire(int64_t bytes);
  // Copies `host` into `memory` after `host_ready`, which may be null. Without
  // `copies` only the event is of use: what the memory was used for before is
  // over then. An error is the device's end.
  absl::StatusOr<SharedEvent> Upload(const at::Tensor& memory,
                                     const at::Tensor& host, bool copies,
                                     const SharedEvent& host_ready);
  // Takes back what Acquire() gave, after what the current stream has been
  // given until now; with `copies`, its bytes go to `host`, which is free when
  // the event is reached.
  absl::StatusOr<SharedEvent> Release(const at::Tensor& memory,
                                      const at::Tensor& host, bool copies);

  // Lets the host wait. DeadlineExceeded.
  absl::Status Await(const SharedEvent& event) const;

  BufferPool::Stats stats() const { return memory_.stats(); }

 private:
  const c10::Device device_;
  const absl::Duration timeout_;
  SideStream up_;
  SideStream down_;
  BufferPool memory_;
};

}  // namespace fsdp

#endif  // FSDP_MEMORY_DEVICE_COPIES_H_
