// Makes reduced gradients the gradient of a shard, and manages the memory of
// reduce buffers.
#ifndef FSDP_RUNTIME_SHARD_GRADIENT_H_
#define FSDP_RUNTIME_SHARD_GRADIENT_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/memory/buffer_pool.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/runtime/gradient_buffer.h"

namespace fsdp {

// Puts gradients of one flat parameter into .grad of its shard's slices, as
// views of memory that it owns or that rests elsewhere. Flags tell whether any
// rank has a gradient; reading a device's makes the host wait, so that is done
// only if this rank lacks one. Not thread-safe.
class ShardGradient {
 public:
  using Layout = GradientBuffer::Layout;

  // `parameter` must outlive this object.
  ShardGradient(flat_param::FlatParameter* parameter,
                GradientBufferOptions options);

  ShardGradient(ShardGradient&&) noexcept = default;
  ShardGradient(const ShardGradient&) = delete;

  // Set it as the GradientBuffer's.
  void SetScaling(GradientScaling scaling) { options_.scaling = scaling; }

  // Returns whether Take() is possible, whatever the gradients: with one rank,
  // if a reduction would change neither dtype nor value and nothing of the
  // parameter rests elsewhere.
  bool TakesGradients() const;
  // Makes each gradient that of its slice, or adds it to the one that is there,
  // as LibTorch's leaves do, without a buffer and a reduction. One whose memory
  // nobody else can see is not copied. Returns false, and does nothing, if that
  // is not possible. `gradients` are as for GradientBuffer::Fill(); the caller
  // drops them.
  bool Take(absl::Span<const at::Tensor> gradients);

  // Takes `buffer` after a sum over all ranks and adds the mean into the
  // gradient of each shard slice. A slice without .grad takes the new values;
  // to .grad, ours or the user's, they are added. Errors are those of
  // RestingMemory.
  absl::Status AccumulateMean(const ReduceBuffer& buffer);

  // The same without a copy, if the mean of one rank would be a plain copy into
  // nothing. The gradient takes the buffer's memory, which nobody else knows,
  // and the buffer the gradient's former memory, as large, or undefined.
  // Returns whether it did so.
  bool TakeOver(ReduceBuffer& buffer);
  // Returns bytes that an earlier buffer has left and no gradient uses, or
  // undefined, for whoever is about to fill a buffer that TakeOver() may take.
  at::Tensor GiveUnused();

  // The same in one go with the reduction, if the slices' gradients allow it: a
  // reduce-scatter puts its scaled sum, a segment, into `out`, and
  // FinishDirect() attaches the gradients when it is done. Several may be under
  // way; they finish in order.
  struct DirectTarget {
    at::Tensor out;
    comm::ScaledSum sum;
  };
  absl::StatusOr<std::optional<DirectTarget>> StartDirect(const Layout& layout);
  void FinishDirect(const Produced& produced = {});

  // Call it after a failure: no direct reduction is under way any more. Memory
  // that they may still write is given to nothing else, so slices whose
  // gradient lies there lose it.
  void ForgetDirect();
  // Call it before the gradient is added to.
  void Prefetch();

  // The memory of attached and future gradients; undefined: it will be new.
  const at::Tensor& values() const { return values_; }
  // Returns how often the host has read flags of a device.
  int64_t flag_reads() const { return flag_reads_; }

  // Frees the memory if no slice has a gradient in it. Returns the bytes of the
  // buffer that TakeOver() took.
  at::Tensor DropUnused();

 private:
  at::Tensor OwnSegment(const ReduceBuffer& buffer) const;
  void AccumulateSlice(int i, const at::Tensor& segment, double scale);
  bool HoldsOurs(int i) const;
  // Whose gradients the slices of a layout have.
  enum class Present { kNone, kOurs, kOthers, kMixed };
  Present PresentGradients(const GradientLayout& layout) const;
  static Use UseFor(Present present);
  absl::Status SetLayout(const Layout& layout);
  void RenewMemory(Present present);
  void Attach(const Produced& produced, const at::Tensor& flags);
  at::Tensor GradientSlice(int i) const;

  flat_param::FlatParameter* const parameter_;
  GradientBufferOptions options_;
  // One segment of layout_. The slices' .grad are views of it.
  at::Tensor values_;
  Layout layout_;
  bool is_taken_over_ = false;
  int64_t flag_reads_ = 0;
  std::deque<Resident> direct_;      // one for each that is under way
  std::vector<Resident> abandoned_;  // of those that were forgotten
};

// The pool that reduce buffers come from. Whoever holds a ReduceBuffer gives
// its memory back, when nobody reads it any more. Not thread-safe.
class ReduceMemory : public BufferPool {
 public:
  ReduceMemory(Allocate allocate, c10::Device device)
      : BufferPool(std::move(allocate)), device_(device) {}

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
  void GiveBack(ReduceBuffer& buffer, std::unique_ptr<comm::Work> reader);
  // Gives the memory back, if there is any, and drops the layout.
  void DropKept(ReduceBuffer& buffer);
  // Makes discarded bytes, maybe undefined, memory for buffers. The current
  // stream is the last that has used them.
  void TakeBytes(const at::Tensor& memory);

 private:
  const c10::Device device_;
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_SHARD_GRADIENT_H_
