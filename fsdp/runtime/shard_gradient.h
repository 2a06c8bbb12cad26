// The gradient of a shard: what reduced gradients become.
#ifndef FSDP_RUNTIME_SHARD_GRADIENT_H_
#define FSDP_RUNTIME_SHARD_GRADIENT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/runtime/gradient_buffer.h"

namespace fsdp {

// Of one flat parameter: puts gradients into .grad of its shard's slices, as
// views of memory that it owns, or that rests elsewhere. Of a device, flags
// that tell whether any rank has a gradient are read, which makes the host
// wait, only where this rank lacks one. Not thread-safe.
class ShardGradient {
 public:
  using Layout = GradientBuffer::Layout;

  // `parameter` outlives this object.
  ShardGradient(flat_param::FlatParameter* parameter,
                GradientBufferOptions options);

  ShardGradient(ShardGradient&&) noexcept = default;
  ShardGradient(const ShardGradient&) = delete;

  // That of the GradientBuffer.
  void SetScaling(GradientScaling scaling) { options_.scaling = scaling; }

  // Whether Take() is possible, whatever the gradients: of one rank, where a
  // reduction would change neither dtype nor value and nothing of the parameter
  // rests elsewhere.
  bool TakesGradients() const;
  // Without a buffer and a reduction: each gradient becomes that of its slice,
  // or is added to the one that is there, as LibTorch's leaves do. One whose
  // memory nobody else can see is not copied. False, with nothing done, where
  // that is not possible. `gradients` as for GradientBuffer::Fill(); the caller
  // drops them.
  bool Take(absl::Span<const at::Tensor> gradients);

  // `buffer` after a sum over all ranks: adds the mean into the gradient of
  // each shard slice. A slice without .grad takes the new values; one with
  // .grad, ours or the user's, gets them added. Errors as RestingMemory's.
  absl::Status AccumulateMean(const ReduceBuffer& buffer);

  // The same without a copy, where the mean of one rank would be a plain copy
  // into nothing: the buffer's memory, which nobody else knows, becomes the
  // gradient's, and in exchange is what the gradient had before, as large, or
  // undefined. Says whether it is so.
  bool TakeOver(ReduceBuffer& buffer);
  // For whoever is about to fill a buffer that TakeOver() may take: what an
  // earlier one has left and no gradient uses any more, bytes, or undefined.
  at::Tensor GiveUnused();

  // The same in one go with the reduction, where the gradients of the slices
  // allow it: a reduce-scatter puts its scaled sum, a segment, into `out`, and
  // when it is done FinishDirect() attaches the gradients. Several may be under
  // way, which finish in order.
  struct DirectTarget {
    at::Tensor out;
    comm::ScaledSum sum;
  };
  absl::StatusOr<std::optional<DirectTarget>> StartDirect(const Layout& layout);
  void FinishDirect(const Produced& produced = {});

  // After a failure: no direct reduction is under way any more. The memory that
  // they have begun to write, and may still write, is given to nothing else:
  // slices whose gradient lies there have none any more.
  void ForgetDirect();
  // The gradient is about to be added to.
  void Prefetch();

  // What gradients that are attached lie in, and will; undefined: new memory.
  const at::Tensor& values() const { return values_; }
  // How often the host has read flags of a device.
  int64_t flag_reads() const { return flag_reads_; }

  // Lets the memory go where no slice has a gradient in it. What TakeOver()
  // took is returned, the bytes of its buffer.
  at::Tensor DropUnused();

 private:
  at::Tensor OwnSegment(const ReduceBuffer& buffer) const;
  void TakeOne(int i, const at::Tensor& gradient) const;
  void AccumulateSlice(int i, const at::Tensor& segment, double scale);
  bool HoldsOurs(int i) const;
  // What the slices of a layout have for gradients.
  enum class Present { kNone, kOurs, kOthers, kMixed };
  Present PresentGradients(const GradientLayout& layout) const;
  static Use UseFor(Present present);
  absl::Status SetLayout(const Layout& layout);
  void RenewMemory(Present present);
  void Attach(const Produced& produced, const at::Tensor& flags);
  at::Tensor GradientSlice(int i) const;

  flat_param::FlatParameter* const parameter_;
  GradientBufferOptions options_;
  // One segment of layout_; .grad of slices are views of it.
  at::Tensor values_;
  Layout layout_;
  bool is_taken_over_ = false;
  int64_t flag_reads_ = 0;
  std::deque<Resident> direct_;      // one for each under way
  std::vector<Resident> abandoned_;  // of those that were forgotten
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_SHARD_GRADIENT_H_
