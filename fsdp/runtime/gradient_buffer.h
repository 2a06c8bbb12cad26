// The way of gradients from autograd to the optimizer: into a buffer laid out
// for one reduce-scatter, and from the reduced part into the shard's gradient.
#ifndef FSDP_RUNTIME_GRADIENT_BUFFER_H_
#define FSDP_RUNTIME_GRADIENT_BUFFER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/layout.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/runtime/gradient_layout.h"

namespace fsdp {

// How gradients become their mean. The gradients are multiplied by `before`
// the reduction and by `after` it.
struct GradientScaling {
  double before = 1;
  double after = 1;
  // Only because the communicator's sum is faster so: whoever sums otherwise
  // gets the gradients as they are.
  bool before_for_speed = false;
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

// What the gradient of a shard takes at most, with all that comes with it: when
// every parameter is trained.
int64_t ShardGradientBytes(const flat_param::FlatLayout& layout,
                           const GradientBufferOptions& options);

// Memory that gradients have been laid out in.
struct ReduceBuffer {
  std::shared_ptr<const GradientLayout> layout;  // null: nothing is trained
  at::Tensor memory;  // 1-D, uint8, at least layout->bytes() long
  Produced produced = {};
  bool is_segment = false;  // the memory is of this rank's segment alone

  bool has_gradients() const { return memory.defined(); }
};

// Lays out the gradients of one flat parameter (gradient_layout.h): of its
// parameters that are trained, whose shard slices require grad. A flag is 1
// where this rank's backward produced a gradient for the parameter. Summed with
// the rest, it tells every rank whether any rank did: a parameter no rank used
// keeps an undefined gradient, so that an optimizer does not decay it. Of a
// device the flags are read, which makes the host wait, only where this rank
// lacks a gradient. Not thread-safe.
class GradientBuffer {
 public:
  using Layout = std::shared_ptr<const GradientLayout>;

  // `parameter` outlives this object.
  GradientBuffer(flat_param::FlatParameter* parameter,
                 GradientBufferOptions options);

  GradientBuffer(GradientBuffer&&) = default;
  GradientBuffer(const GradientBuffer&) = delete;

  const GradientBufferOptions& options() const { return options_; }
  void SetScaling(GradientScaling scaling) { options_.scaling = scaling; }
  const GradientScaling& scaling() const { return options_.scaling; }

  // Of what is trained now, and of what `with` has; null for nothing. The same
  // object as long as it is the same layout.
  Layout CurrentLayout(const Layout& with = nullptr) const;
  // Of a buffer with that layout; 0 without one.
  int64_t bytes() const;
  // Of the shard's gradient; 0 without one.
  int64_t shard_bytes() const;

  // 1-D views of a buffer's memory: all of it, and the segment of this rank.
  at::Tensor Whole(const ReduceBuffer& buffer) const;
  at::Tensor OwnSegment(const ReduceBuffer& buffer) const;

  // Writes every element of the buffer. gradients[i] belongs to parameter i:
  // undefined, or of its shape with any strides (also expanded), or sparse;
  // ignored where the layout does not have the parameter.
  void Fill(ReduceBuffer& buffer, absl::Span<const at::Tensor> gradients) const;
  // As Fill(), adding to what an earlier Fill() has left in the buffer.
  void Add(ReduceBuffer& buffer, absl::Span<const at::Tensor> gradients) const;
  // Writes every element of `to` with what `from` has of the same parameters.
  void Convert(const ReduceBuffer& from, ReduceBuffer& to) const;
  // Adds this rank's segment of `from` to that of `to`, as Convert().
  void AddSegment(const ReduceBuffer& from, ReduceBuffer& to) const;

  // Whether Take() is possible, whatever the gradients: of one rank, where a
  // reduction would change neither dtype nor value and nothing of the parameter
  // rests elsewhere.
  bool TakesGradients() const;
  // Without a buffer and a reduction: each gradient becomes that of its slice,
  // or is added to the one that is there, as LibTorch's leaves do. One whose
  // memory nobody else can see is not copied. False, with nothing done, where
  // that is not possible. `gradients` as for Fill(); the caller drops them.
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
  const at::Tensor& shard_gradient() const { return shard_gradient_; }
  // How often the host has read flags of a device.
  int64_t flag_reads() const { return flag_reads_; }

  // Lets the memory of the shard's gradient go where no slice has one. What
  // TakeOver() took is returned, the bytes of its buffer.
  at::Tensor DropUnusedGradient();

 private:
  void CopyParameters(const ReduceBuffer& from, ReduceBuffer& to,
                      bool adds) const;
  void PackInto(const ReduceBuffer& buffer,
                absl::Span<const at::Tensor> gradients, bool adds) const;
  void WriteFlags(const ReduceBuffer& buffer,
                  absl::Span<const at::Tensor> gradients) const;
  void RaiseFlags(const ReduceBuffer& buffer,
                  absl::Span<const at::Tensor> gradients) const;
  void FillParameter(const GradientLayout& layout, const at::Tensor& whole,
                     int i, const at::Tensor& gradient) const;
  void AddParameter(const GradientLayout& layout, const at::Tensor& whole,
                    int i, const at::Tensor& gradient) const;
  void TakeOne(int i, const at::Tensor& gradient) const;
  void AccumulateSlice(int i, const at::Tensor& segment, double scale);
  bool HoldsOurs(int i) const;
  // What the slices of a layout have for gradients.
  enum class Present { kNone, kOurs, kOthers, kMixed };
  Present PresentGradients(const GradientLayout& layout) const;
  static Use UseFor(Present present);
  absl::Status SetShardLayout(const Layout& layout);
  void RenewMemory(Present present);
  void Attach(const Produced& produced, const at::Tensor& flags);
  at::Tensor GradientSlice(int i) const;

  flat_param::FlatParameter* const parameter_;
  GradientBufferOptions options_;
  mutable Layout layout_;  // the last of CurrentLayout()
  // One segment of shard_layout_; .grad of slices are views of it.
  at::Tensor shard_gradient_;
  Layout shard_layout_;
  bool is_taken_over_ = false;
  int64_t flag_reads_ = 0;
  std::deque<Resident> direct_;      // one for each under way
  std::vector<Resident> abandoned_;  // of those that were forgotten
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_GRADIENT_BUFFER_H_
