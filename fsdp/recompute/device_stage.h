// The host's side of tensors that travel between a device and a store.
#ifndef FSDP_RECOMPUTE_DEVICE_STAGE_H_
#define FSDP_RECOMPUTE_DEVICE_STAGE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/device_streams.h"
#include "fsdp/memory/buffer_pool.h"
#include "fsdp/memory/device_copies.h"

namespace fsdp {

// Copies on one stream up and one stream down, beside what the device computes,
// and page-locked memory of the host for them, which is used again: as much as
// was in use at once. LibTorch's pinned allocations would round each up to a
// power of two and keep them for the life of the process. Used by one thread at
// a time. Errors but DeadlineExceeded are the device's end.
class DeviceStage {
 public:
  // `timeout`: of the last wait.
  DeviceStage(c10::Device device, absl::Duration timeout);
  // Lets the host wait for all copies.
  ~DeviceStage();

  c10::Device device() const { return device_; }
  c10::Stream CurrentStream() const;
  // What the current stream has been given until now.
  absl::StatusOr<SharedEvent> Now() const;

  // At least `bytes` of the host, of any content; 1-D.
  absl::StatusOr<at::Tensor> Acquire(int64_t bytes);
  // Takes them back, for when `last` is reached; it may be null.
  void Release(const at::Tensor& host, SharedEvent last);
  // Lets the host wait until no more than `limit` bytes, `bytes` of them new,
  // are taken back and not free, or none.
  absl::Status MakeRoom(int64_t bytes, int64_t limit, absl::Time deadline);
  // Keeps `memory` until `last` is reached.
  void Keep(at::Tensor memory, SharedEvent last);

  // Copy all of the device's `memory`, 1-D bytes, to the beginning of `host`,
  // after what the current stream has been given; or back, after both events,
  // of which `host_ready` may be null.
  absl::StatusOr<SharedEvent> Down(const at::Tensor& memory,
                                   const at::Tensor& host);
  absl::StatusOr<SharedEvent> Up(const at::Tensor& host,
                                 const SharedEvent& host_ready,
                                 const at::Tensor& memory,
                                 const SharedEvent& memory_ready);
  // Copies down from now on come after `last`, which may be null.
  absl::Status OrderDown(const SharedEvent& last);

  // `stream` does what comes from now on after `event`.
  absl::Status Order(c10::Stream stream, const SharedEvent& event) const;
  // The current stream does, with `memory` that was allocated for `owner`.
  absl::Status Use(const at::Tensor& memory, c10::Stream owner,
                   const SharedEvent& event) const;

  // Lets the host wait for a copy, or for all of them.
  absl::Status Await(const SharedEvent& event, absl::Time deadline) const;
  absl::Status AwaitAll(absl::Time deadline);

  // Finds what is free.
  void Poll();
  // What Keep() had. Freeing it may run anybody's code.
  std::vector<at::Tensor> TakeKept() { return std::exchange(kept_, {}); }

 private:
  struct Leaving {
    at::Tensor memory;
    SharedEvent last;
    bool host;
  };

  absl::Status AwaitFirstLeaving(absl::Time deadline);

  const c10::Device device_;
  const absl::Duration timeout_;
  SideStream up_;
  SideStream down_;
  BufferPool pages_;
  std::deque<Leaving> leaving_;
  int64_t leaving_bytes_ = 0;  // of the host
  std::vector<at::Tensor> kept_;
};

}  // namespace fsdp

#endif  // FSDP_RECOMPUTE_DEVICE_STAGE_H_
