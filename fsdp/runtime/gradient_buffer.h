// The way of gradients from autograd into a buffer laid out for one
// reduce-scatter. What becomes of its result is in shard_gradient.h.
#ifndef FSDP_RUNTIME_GRADIENT_BUFFER_H_
#define FSDP_RUNTIME_GRADIENT_BUFFER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
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
  // 1-D, of `dtype`: what is for the shard of `rank`. Of a segment, all of it.
  at::Tensor Segment(at::ScalarType dtype, int rank) const;
};

// Lays out the gradients of one flat parameter (gradient_layout.h): of its
// parameters that are trained, whose shard slices require grad. A flag is 1
// where this rank's backward produced a gradient for the parameter. Summed with
// the rest, it tells every rank whether any rank did: a parameter no rank used
// keeps an undefined gradient, so that an optimizer does not decay it. Owns no
// buffer. Not thread-safe.
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
  // Of the shard's gradient for what is trained now; 0 without one.
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

  flat_param::FlatParameter* const parameter_;
  GradientBufferOptions options_;
  mutable Layout layout_;  // the last of CurrentLayout()
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_GRADIENT_BUFFER_H_
