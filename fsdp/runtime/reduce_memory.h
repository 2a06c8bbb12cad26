// Manages the memory of reduce buffers.
#ifndef FSDP_RUNTIME_REDUCE_MEMORY_H_
#define FSDP_RUNTIME_REDUCE_MEMORY_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "fsdp/memory/buffer_pool.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/runtime/shard_gradient.h"

namespace fsdp {

// Owns the pool that reduce buffers come from. Whoever holds a ReduceBuffer
// gives its memory back, when nobody reads it any more. Not thread-safe.
class ReduceMemory {
 public:
  ReduceMemory(BufferPool::Allocate allocate, c10::Device device)
      : device_(device), pool_(std::move(allocate)) {}

  // Adds `gradients` of the flat parameter of `of`, maybe none, to what
  // `buffer` has, and gives it `layout`. If `taker` is not null, the buffer may
  // become its gradient and may use memory that an earlier one has left there.
  absl::Status Collect(const GradientBuffer& of,
                       absl::Span<const at::Tensor> gradients,
                       const GradientBuffer::Layout& layout,
                       ShardGradient* taker, ReduceBuffer& buffer);
  // Adds this rank's segment of `buffer` to `sums`, a segment or empty.
  absl::Status AddToSums(const GradientBuffer& of, const ReduceBuffer& buffer,
                         ReduceBuffer& sums);

  // Gives the memory back. The current stream and `reader`, which may be null,
  // are the last to use it.
  void Release(ReduceBuffer& buffer, std::unique_ptr<comm::Work> reader);
  // Gives the memory back, if there is any, and drops the layout.
  void DropKept(ReduceBuffer& buffer);
  // Drops memory that something outside may still write, or that has become a
  // gradient.
  void Discard(const at::Tensor& memory) { pool_.Discard(memory); }
  // Makes discarded bytes, maybe undefined, memory for buffers. The current
  // stream is the last that has used them.
  void Adopt(const at::Tensor& memory);

  void ForgetUses() { pool_.ForgetUses(); }
  void SortFree() { pool_.SortFree(); }
  std::vector<at::Tensor> free_buffers() const { return pool_.free_buffers(); }
  const PoolStats& stats() const { return pool_.stats(); }

 private:
  const c10::Device device_;
  BufferPool pool_;
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_REDUCE_MEMORY_H_
