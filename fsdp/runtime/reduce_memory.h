// Memory of reduce buffers, from the first gradient in it until nobody reads it
// any more.
#ifndef FSDP_RUNTIME_REDUCE_MEMORY_H_
#define FSDP_RUNTIME_REDUCE_MEMORY_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "comm/work.h"
#include "fsdp/memory/buffer_pool.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/runtime/shard_gradient.h"

namespace fsdp {

// Owns the pool that reduce buffers come from. A ReduceBuffer is its holder's,
// who gives its memory back. Not thread-safe.
class ReduceMemory {
 public:
  ReduceMemory(BufferPool::Allocate allocate, c10::Device device)
      : device_(device), pool_(std::move(allocate)) {}

  // Adds `gradients` of the flat parameter of `of`, or none, to what `buffer`
  // has, which gets `layout`. Unless null, `taker` is whose gradient the buffer
  // may become: what an earlier one has left there is used again.
  absl::Status Collect(const GradientBuffer& of,
                       absl::Span<const at::Tensor> gradients,
                       const GradientBuffer::Layout& layout,
                       ShardGradient* taker, ReduceBuffer& buffer);
  // Adds this rank's segment of `buffer` to `sums`, a segment or nothing yet.
  absl::Status AddToSums(const GradientBuffer& of, const ReduceBuffer& buffer,
                         ReduceBuffer& sums);

  // Gives the memory back. The current stream and `reader`, unless null, are
  // the last that use it.
  void Release(ReduceBuffer& buffer, std::unique_ptr<comm::Work> reader);
  // Gives back what was kept, if it has gradients, and its layout.
  void DropKept(ReduceBuffer& buffer);
  // Of a buffer that something outside may still write, or that is a gradient
  // now.
  void Discard(const at::Tensor& memory) { pool_.Discard(memory); }
  // Bytes that were discarded, or undefined: they are for buffers from now on.
  // The current stream is the last that has used them.
  void Adopt(const at::Tensor& memory);

  void ForgetUses() { pool_.ForgetUses(); }
  void SortFree() { pool_.SortFree(); }
  std::vector<at::Tensor> free_buffers() const { return pool_.free_buffers(); }
  const BufferPool::Stats& stats() const { return pool_.stats(); }

 private:
  absl::Status LayOut(const GradientBuffer& of,
                      const GradientBuffer::Layout& layout,
                      ReduceBuffer& buffer);

  const c10::Device device_;
  BufferPool pool_;
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_REDUCE_MEMORY_H_
