// The way of gradients from autograd to the optimizer: into a buffer laid out
// for one reduce-scatter, and from the reduced part into the shard's gradient.
#ifndef FSDP_GRADIENT_BUFFER_H_
#define FSDP_GRADIENT_BUFFER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/layout.h"
#include "fsdp/resting_memory.h"

namespace fsdp {

// How gradients become their mean. The gradients are multiplied by `before`
// the reduction and by `after` it.
struct GradientScaling {
  double before = 1;
  double after = 1;
};

// The scaling for a mean over `ranks`: all of it afterwards, or for fp16, where
// a sum may overflow and a small gradient vanish, about half of it (in powers
// of two) before: the factors of fairscale and PyTorch FSDP.
GradientScaling MeanOver(int ranks, at::ScalarType reduce_dtype);

struct GradientBufferOptions {
  at::ScalarType reduce_dtype;    // of the buffer
  at::ScalarType gradient_dtype;  // of the shard's gradient
  GradientScaling scaling;
  // Of the shard's gradient, ShardGradientBytes() long; null: allocated when it
  // is needed.
  std::shared_ptr<RestingMemory> memory = nullptr;
};

// Which parameters this rank's backward has produced a gradient for; empty: not
// known.
using Produced = std::vector<bool>;
// Adds those of `gradients`.
void MarkProduced(absl::Span<const at::Tensor> gradients, Produced& produced);

// What the gradient of a shard takes, with all that comes with it.
int64_t ShardGradientBytes(const flat_param::FlatLayout& layout,
                           const GradientBufferOptions& options);

// Layout of the buffer, in elements: one segment per rank,
//
//   | gradient of the rank's shard | one flag per parameter | padding |
//
// A flag is 1 where this rank's backward produced a gradient for the
// parameter. Summed with the rest, it tells every rank whether any rank did:
// a parameter no rank used keeps an undefined gradient, so that an optimizer
// does not decay it. Of a device the flags are read, which makes the host wait,
// only where this rank lacks a gradient. Not thread-safe.
class GradientBuffer {
 public:
  // `parameter` outlives this object.
  GradientBuffer(flat_param::FlatParameter* parameter,
                 GradientBufferOptions options);

  GradientBuffer(GradientBuffer&&) = default;
  GradientBuffer(const GradientBuffer&) = delete;

  const GradientBufferOptions& options() const { return options_; }
  void SetScaling(GradientScaling scaling) { options_.scaling = scaling; }

  int64_t bytes() const;
  // 1-D views of `memory`, uint8 and at least bytes() long: all of it, and the
  // segment of this rank.
  at::Tensor Whole(const at::Tensor& memory) const;
  at::Tensor OwnSegment(const at::Tensor& memory) const;

  // Writes every element of the buffer. gradients[i] belongs to parameter i:
  // undefined, or of its shape with any strides (also expanded), or sparse.
  void Fill(const at::Tensor& memory,
            absl::Span<const at::Tensor> gradients) const;
  // As Fill(), adding to what an earlier Fill() has left in the buffer.
  void Add(const at::Tensor& memory,
           absl::Span<const at::Tensor> gradients) const;

  // `memory` after a sum over all ranks: adds the mean into the gradient of
  // each shard slice. A slice without .grad takes the new values; one with
  // .grad, ours or the user's, gets them added. Errors as RestingMemory's.
  absl::Status AccumulateMean(const at::Tensor& memory,
                              const Produced& produced = {});

  // The same without a copy, where the mean of one rank would be a plain copy
  // into nothing: `memory`, which nobody else knows, becomes the gradient's,
  // and in exchange is what the gradient had before, as large, or undefined.
  // Says whether it is so.
  bool TakeOver(at::Tensor& memory, const Produced& produced);

  // The same in one go with the reduction, where the gradients of the slices
  // allow it: a reduce-scatter puts its scaled sum, a segment, into `out`, and
  // when it is done FinishDirect() attaches the gradients. Several may be under
  // way, which finish in order.
  struct DirectTarget {
    at::Tensor out;
    comm::ScaledSum sum;
  };
  absl::StatusOr<absl::optional<DirectTarget>> StartDirect();
  void FinishDirect(const Produced& produced = {});

  // After a failure: no direct reduction is under way any more. The memory that
  // they have begun to write, and may still write, is given to nothing else:
  // slices whose gradient lies there have none any more.
  void ForgetDirect();
  // The gradient is about to be added to.
  void Prefetch();

  // Lets the memory of the shard's gradient go where no slice has one. What
  // TakeOver() took is returned, the bytes of the buffer.
  at::Tensor DropUnusedGradient();

 private:
  void PackInto(const at::Tensor& whole, absl::Span<const at::Tensor> gradients,
                bool adds) const;
  void WriteFlags(const at::Tensor& whole,
                  absl::Span<const at::Tensor> gradients) const;
  void RaiseFlags(const at::Tensor& whole,
                  absl::Span<const at::Tensor> gradients) const;
  void FillParameter(const at::Tensor& whole, int i,
                     const at::Tensor& gradient) const;
  void AddParameter(const at::Tensor& whole, int i,
                    const at::Tensor& gradient) const;
  void AccumulateSlice(int i, const at::Tensor& segment, double scale);
  bool HoldsOurs(int i) const;
  // What the slices have for gradients.
  enum class Present { kNone, kOurs, kMixed };
  Present PresentGradients() const;
  static Use UseFor(Present present);
  void RenewMemory(Present present);
  void Attach(const at::Tensor& flags, const Produced& produced);
  at::Tensor GradientSlice(int i) const;

  flat_param::FlatParameter* const parameter_;
  GradientBufferOptions options_;
  const int64_t segment_numel_;
  // Gaps between parameters within the buffer, as [begin, end) pairs.
  std::vector<flat_param::Slice> gaps_;
  // One segment; .grad of slices are views of it.
  at::Tensor shard_gradient_;
  bool is_taken_over_ = false;
  std::deque<Resident> direct_;      // one for each under way
  std::vector<Resident> abandoned_;  // of those that were forgotten
};

}  // namespace fsdp

#endif  // FSDP_GRADIENT_BUFFER_H_
