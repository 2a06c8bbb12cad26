// Starts the collectives that sum gradients, the communicator's or the user's,
// and manages the memory of reduce buffers.
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
#include "comm/communicator.h"
#include "fsdp/memory/buffer_pool.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/runtime/gradient_layout.h"
#include "fsdp/runtime/runtime_common.h"
#include "fsdp/runtime/runtime_unit.h"
#include "fsdp/runtime/shard_gradient.h"

namespace fsdp {

// Starts collectives on the current stream, labels them and notes them in the
// order log. Owns only labels. Not thread-safe.
class ReductionCalls {
 public:
  // Both arguments must outlive this object.
  ReductionCalls(RuntimeCommon& common, const RuntimeHooks& hooks);

  // Sums `buffer`, which has gradients of flat parameter `i`, over the ranks
  // that share the unit: into this rank's segment, or straight into the shard's
  // gradient if `direct` is not null and allows it.
  struct ReduceScatter {
    std::unique_ptr<comm::Work> work;
    bool is_direct = false;
  };
  absl::StatusOr<ReduceScatter> StartReduceScatter(
      int unit, size_t i, const GradientBuffer& gradients,
      const ReduceBuffer& buffer, ShardGradient* direct);

  // Sums this rank's segment over replicas, in place.
  absl::StatusOr<std::unique_ptr<comm::Work>> StartAllReduce(
      int unit, size_t i, const GradientBuffer& gradients,
      const ReduceBuffer& buffer);

 private:
  const std::string& Label(int unit, size_t i, const GradientLayout& layout);

  RuntimeCommon& common_;
  const RuntimeHooks& hooks_;
  // Labels of reductions of some of the parameters, by which are trained; per
  // unit and flat parameter.
  std::vector<std::vector<std::map<std::vector<bool>, std::string>>> labels_;
};

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
  absl::Status LayOut(const GradientBuffer& of,
                      const GradientBuffer::Layout& layout,
                      ReduceBuffer& buffer);

  const c10::Device device_;
  BufferPool pool_;
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_REDUCTION_CALLS_H_
