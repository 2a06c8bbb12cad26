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

// Copies on one stream up and one down while the device computes, through
// page-locked memory of the host that is used again, as much as was in use at
// once. LibTorch's pinned allocations would be rounded up to powers of two and
// kept for the life of the process. Used by one thread at a time. Errors other
// than DeadlineExceeded mean that the device has failed.
class DeviceStage {
 public:
  // `timeout` limits the destructor's wait.
  DeviceStage(c10::Device device, absl::Duration timeout);
  // Makes the host wait for all copies.
  ~DeviceStage();

  c10::Device device() const { return device_; }
  c10::Stream CurrentStream() const;
  // Returns the point that the current stream's work has reached.
  absl::StatusOr<SharedEvent> Now() const;

  // Returns at least `bytes` of uninitialised host memory, 1-D.
  absl::StatusOr<at::Tensor> Acquire(int64_t bytes);
  // Takes host memory back, free when `last`, maybe null, is reached.
  void Release(const at::Tensor& host, SharedEvent last);
  // Makes the host wait until released memory that is not free yet, with
  // `bytes` of new memory, is at most `limit` bytes, or is all free.
  absl::Status MakeRoom(int64_t bytes, int64_t limit, absl::Time deadline);
  // Keeps `memory` until `last` is reached.
  void Keep(at::Tensor memory, SharedEvent last);

  // Down() copies all of the device's `memory`, 1-D bytes, to the beginning of
  // `host`, after the current stream's work; Up() copies back, after both
  // events, of which `host_ready` may be null. Both return the end of the copy.
  absl::StatusOr<SharedEvent> Down(const at::Tensor& memory,
                                   const at::Tensor& host);
  absl::StatusOr<SharedEvent> Up(const at::Tensor& host,
                                 const SharedEvent& host_ready,
                                 const at::Tensor& memory,
                                 const SharedEvent& memory_ready);
  // Makes later copies down wait for `last`, which may be null.
  absl::Status OrderDown(const SharedEvent& last);

  // Makes later work of `stream` wait for `event`.
  absl::Status Order(c10::Stream stream, const SharedEvent& event) const;
  // Makes the current stream wait for `event` before it uses `memory`, which
  // was allocated for the stream `owner`.
  absl::Status Use(const at::Tensor& memory, c10::Stream owner,
                   const SharedEvent& event) const;

  // Make the host wait for one copy, or for all.
  absl::Status Await(const SharedEvent& event, absl::Time deadline) const;
  absl::Status AwaitAll(absl::Time deadline);

  // Finds memory whose last use is over.
  void Poll();
  // Returns memory whose Keep() is over. Freeing it may run anybody's code, so
  // do it without a lock.
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
