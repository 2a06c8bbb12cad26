// A pool of buffers of a few sizes, which are handed out and taken back many
// times per step.
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
#include "fsdp/memory/memory_plan.h"

namespace fsdp {

// Reuses what it has allocated, so that after the first step a buffer costs
// neither a system call nor a page fault. Not thread-safe.
class BufferPool {
 public:
  // Allocates `bytes` of uninitialised memory as a 1-D uint8 tensor. Ranks
  // whose schedules agree call it in the same order with the same sizes, so it
  // may be collective (comm::Communicator::AllocateSymmetric).
  using Allocate = std::function<absl::StatusOr<at::Tensor>(int64_t bytes)>;
  // Waits, or lets the device's current stream wait, until the reader of a
  // buffer is done. It is dropped without a call if nobody needs the buffer.
  using AwaitReader = absl::AnyInvocable<absl::Status() const>;

  // While a new buffer fits into `room` bytes, Acquire() allocates instead of
  // waiting for the uses of a free one. After that it reuses buffers, and lets
  // free ones go to make room for one of another size.
  explicit BufferPool(Allocate allocate, int64_t room = 0);

  // Returns a buffer of at least `bytes`: a free one if one Fits()
  // (memory_plan.h), else a new one.
  absl::StatusOr<at::Tensor> Acquire(int64_t bytes);
  // Takes back a buffer from Acquire(). Only the reader that `reader` waits
  // for, and work that a device was given before `used`, may still use it.
  // Before the buffer is handed out again, Acquire() waits for both or lets
  // the current stream wait.
  void Release(const at::Tensor& buffer, AwaitReader reader = nullptr,
               DeviceEvent used = DeviceEvent());
  // Takes back a buffer and never hands it out again, since something outside
  // may still write it, for example after a failed collective.
  void Discard(const at::Tensor& buffer);

  // Takes a buffer that is not of this pool, or was discarded.
  void Adopt(const at::Tensor& buffer, DeviceEvent used);

  // Forgets what free buffers were used for, so that Acquire() does not wait.
  // The device must have finished all its work.
  void ForgetUses();
  // Orders free buffers as they were allocated, which ranks do together, so
  // that equal requests after it get the same buffers, on all ranks.
  void SortFree();
  // Returns the buffers that are not handed out.
  std::vector<at::Tensor> free_buffers() const;

  const PoolStats& stats() const { return stats_; }

 private:
  struct FreeBuffer {
    at::Tensor buffer;
    AwaitReader reader;  // null: nobody reads it
    DeviceEvent used;
  };

  void TakeBack(const at::Tensor& buffer);
  void NoteNew(const at::Tensor& buffer);
  void LetGo(const at::Tensor& buffer);
  // Returns the end for a buffer that was exchanged for one of this pool.
  std::vector<const void*>::const_iterator PlaceOf(
      const at::Tensor& buffer) const;
  // Returns the smallest buffer that fits; of equal ones, the one that was
  // released first.
  std::vector<FreeBuffer>::iterator Fitting(int64_t bytes);
  static absl::Status AwaitUse(const FreeBuffer& free);
  // Lets free buffers go, the oldest first, until `bytes` fit into the room.
  absl::Status MakeRoom(int64_t bytes);

  Allocate allocate_;
  int64_t room_;
  std::vector<FreeBuffer> free_;        // in order of release
  std::vector<const void*> addresses_;  // in order of allocation
  PoolStats stats_;
};

}  // namespace fsdp

#endif  // FSDP_MEMORY_BUFFER_POOL_H_
