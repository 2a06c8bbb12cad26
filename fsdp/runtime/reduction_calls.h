// The collectives that sum gradients: the communicator's own, or the user's.
#ifndef FSDP_RUNTIME_REDUCTION_CALLS_H_
#define FSDP_RUNTIME_REDUCTION_CALLS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "comm/work.h"
#include "fsdp/memory/buffer_pool.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/runtime/gradient_layout.h"
#include "fsdp/runtime/runtime_common.h"
#include "fsdp/runtime/runtime_unit.h"
#include "fsdp/runtime/shard_gradient.h"

namespace fsdp {

// Starts them on the current stream, labels them and notes them in the order
// log. Owns nothing but labels. Not thread-safe.
class ReductionCalls {
 public:
  // Both outlive this object.
  ReductionCalls(RuntimeCommon& common, const RuntimeHooks& hooks);

  // Sums `buffer`, which has gradients, of flat parameter `i` over the ranks
  // that share the unit: into this rank's segment, or, where `direct` is not
  // null and allows it, straight into the shard's gradient.
  struct ReduceScatter {
    std::unique_ptr<comm::Work> work;
    bool is_direct = false;
  };
  absl::StatusOr<ReduceScatter> StartReduceScatter(
      int unit, size_t i, const GradientBuffer& gradients,
      const ReduceBuffer& buffer, ShardGradient* direct);

  // Sums it over replicas, in place in this rank's segment.
  absl::StatusOr<std::unique_ptr<comm::Work>> StartAllReduce(
      int unit, size_t i, const GradientBuffer& gradients,
      const ReduceBuffer& buffer);

 private:
  const std::string& Label(int unit, size_t i, const GradientLayout& layout);

  RuntimeCommon& common_;
  const RuntimeHooks& hooks_;
  // In reductions of some of the parameters, by which are trained: per unit and
  // flat parameter.
  std::vector<std::vector<std::map<std::vector<bool>, std::string>>> labels_;
};

// Memory of reduce buffers, from the first gradient in it until nobody reads it
// any more.

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

#endif  // FSDP_RUNTIME_REDUCTION_CALLS_H_
