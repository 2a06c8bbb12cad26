// Unsharded memory: buffers that are handed out and taken back many times per
// step, always of the same few sizes.
#ifndef FSDP_MEMORY_BUFFER_POOL_H_
#define FSDP_MEMORY_BUFFER_POOL_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/device_streams.h"

namespace fsdp {

// Keeps what it has allocated and reuses it, so that after the first step a
// buffer costs neither a system call nor a page fault. Not thread-safe.
class BufferPool {
 public:
  // Makes `bytes` of uninitialised memory as a 1-D uint8 tensor. Ranks whose
  // schedules agree call it in the same order with the same sizes, so it may
  // be collective (comm::Communicator::AllocateSymmetric).
  using Allocate = std::function<absl::StatusOr<at::Tensor>(int64_t bytes)>;
  // Waits, or lets the current stream of the device wait, until whoever reads a
  // buffer is done. Dropped without a call where nobody needs the buffer.
  using AwaitReader = absl::AnyInvocable<absl::Status() const>;

  struct Stats {
    int64_t in_use_bytes = 0;       // handed out now
    int64_t peak_in_use_bytes = 0;  // most handed out at once
    int64_t reserved_bytes = 0;     // allocated, handed out or not
    int64_t allocations = 0;        // so far, but of what was discarded
  };

  // As long as less than `room` bytes are reserved, buffers are new ones, so
  // that nothing waits for what has been done with others; from then on it is
  // as without, but that free buffers make room for one of another size.
  explicit BufferPool(Allocate allocate, int64_t room = 0);

  // A buffer of at least `bytes`; a free one where there is one that is not
  // wastefully large.
  absl::StatusOr<at::Tensor> Acquire(int64_t bytes);
  // Takes back what Acquire() gave; nothing may use it any more but whom
  // `reader`, unless null, waits for and what a device has been given before
  // `used`: both of which Acquire() waits for, or lets the stream wait for that
  // is current then, before it hands the buffer out again.
  void Release(const at::Tensor& buffer, AwaitReader reader = nullptr,
               DeviceEvent used = DeviceEvent());
  // As Release(), for a buffer that something outside may still write, after a
  // failed collective for example: it is never handed out again.
  void Discard(const at::Tensor& buffer);

  // As Release(), for a buffer that is not of this pool, or was discarded.
  void Adopt(const at::Tensor& buffer, DeviceEvent used);

  // When the device has done all that it was given: no Acquire() waits for
  // what was done before.
  void ForgetUses();
  // Of free buffers that fit alike the one at the lowest address is first, as
  // if they had been released in that order: equal requests from here on get
  // equal buffers.
  void SortFree();
  // What no one has, and would get.
  std::vector<at::Tensor> free_buffers() const;

  const Stats& stats() const { return stats_; }

 private:
  struct FreeBuffer {
    at::Tensor buffer;
    AwaitReader reader;  // null: nobody reads it
    DeviceEvent used;
  };

  void TakeBack(const at::Tensor& buffer);
  // The first that is released of the smallest that fit.
  std::vector<FreeBuffer>::iterator Fitting(int64_t bytes);
  static absl::Status AwaitUse(const FreeBuffer& free);
  // Lets free buffers go, the oldest first, until `bytes` fit into the room.
  absl::Status MakeRoom(int64_t bytes);

  Allocate allocate_;
  int64_t room_;
  std::vector<FreeBuffer> free_;  // first the one released first
  Stats stats_;
};

}  // namespace fsdp

#endif  // FSDP_MEMORY_BUFFER_POOL_H_
