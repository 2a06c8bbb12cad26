// Lays the gradients of a unit's trained parameters out in a buffer for one
// reduce-scatter. shard_gradient.h takes its result.
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

namespace fsdp {

// Where gradients lie in the buffer, by arithmetic alone. It has one segment
// per rank, all as long as the longest:
//
//   | gradients of what the rank's shard has | one flag per parameter | padding
//
// Both are of trained parameters alone, in the order and alignment of the
// shard, so with all of them trained a segment is laid out as the shard. If one
// rank's shard has all that is trained, the others' segments are as long and
// only padding; at most, segments are as long as a shard and the flags. Numbers
// count elements. Immutable, hence thread-safe.
class GradientLayout {
 public:
  // `trained` has an entry for each parameter of `layout`, which must outlive
  // this object. `element_size` is of the buffer's elements, in bytes.
  GradientLayout(const flat_param::FlatLayout& layout,
                 std::vector<bool> trained, int64_t element_size);

  const std::vector<bool>& trained() const { return trained_; }
  // Indices of trained parameters, ascending.
  const std::vector<int>& parameters() const { return parameters_; }
  int num_flags() const { return static_cast<int>(parameters_.size()); }

  int world_size() const { return layout_.world_size(); }
  // Lengths of a segment: of its gradients, which the flags follow, and of all
  // of it.
  int64_t gradients_numel() const { return gradients_numel_; }
  int64_t segment_numel() const { return segment_numel_; }
  int64_t numel() const { return segment_numel_ * world_size(); }
  int64_t bytes() const { return numel() * element_size_; }
  int64_t segment_bytes() const { return segment_numel_ * element_size_; }

  // Returns the part of trained parameter i that the shard of `rank` has, in
  // the rank's segment; empty if there is none.
  flat_param::Slice InSegment(int i, int rank) const;
  // Returns the ranks whose shards have some of parameter i.
  flat_param::Slice RanksOf(int i) const;
  // The ranges of the buffer before the flags that no parameter covers.
  const std::vector<flat_param::Slice>& gaps() const { return gaps_; }

  // Returns the most elements from the flags on in a segment, whatever is
  // trained.
  static int64_t MostFlags(const flat_param::FlatLayout& layout,
                           int64_t element_size);

 private:
  void FindGaps();

  const flat_param::FlatLayout& layout_;
  const std::vector<bool> trained_;
  const int64_t element_size_;
  std::vector<int> parameters_;
  // Trained parameters one after the other: the begin of each, by its index,
  // and of each rank's shard.
  std::vector<int64_t> begins_;
  std::vector<int64_t> shard_begins_;
  int64_t gradients_numel_ = 0;
  int64_t segment_numel_ = 0;
  std::vector<flat_param::Slice> gaps_;
};

// Makes a mean of gradients: they are multiplied by `before` the reduction and
// by `after` it.
struct GradientScaling {
  double before = 1;
  double after = 1;
  // `before` is set only because the communicator's sum is faster so; other
  // sums get the gradients as they are.
  bool before_for_speed = false;
};

// Returns the scaling for a mean over `ranks`, all of it after the sum. In
// fp16, where a sum may overflow and a small gradient vanish, about half of it
// (in powers of two) comes before. These are fairscale's and PyTorch FSDP's
// factors.
GradientScaling MeanOver(int ranks, at::ScalarType reduce_dtype);

struct GradientBufferOptions {
  at::ScalarType reduce_dtype;    // of the buffer
  at::ScalarType gradient_dtype;  // of the shard's gradient
  GradientScaling scaling;
  // Memory for the shard's gradient, ShardGradientBytes() long; null: allocated
  // when needed.
  std::shared_ptr<RestingMemory> memory = nullptr;
};

// For each parameter, whether this rank's backward has produced a gradient;
// empty: not known.
using Produced = std::vector<bool>;

// Returns the most bytes that a shard's gradient takes, which is when every
// parameter is trained.
int64_t ShardGradientBytes(const flat_param::FlatLayout& layout,
                           const GradientBufferOptions& options);

// Memory in which gradients have been laid out.
struct ReduceBuffer {
  std::shared_ptr<const GradientLayout> layout;  // null: nothing is trained
  at::Tensor memory;  // 1-D, uint8, at least layout->bytes() long
  Produced produced = {};
  bool is_segment = false;  // holds this rank's segment alone

  bool has_gradients() const { return memory.defined(); }
  // Returns the segment for the shard of `rank`, 1-D of `dtype`; if is_segment,
  // all of it.
  at::Tensor Segment(at::ScalarType dtype, int rank) const;
};

// Lays out the gradients of one flat parameter's trained parameters, whose
// shard slices require grad. A flag is 1 if this rank's
// backward has produced the parameter's gradient; summed with the rest, it
// tells every rank whether any rank did. A parameter that no rank used keeps an
// undefined gradient, so that an optimizer does not decay it. Owns no buffer.
// Not thread-safe.
class GradientBuffer {
 public:
  using Layout = std::shared_ptr<const GradientLayout>;

  // `parameter` must outlive this object.
  GradientBuffer(flat_param::FlatParameter* parameter,
                 GradientBufferOptions options);

  GradientBuffer(GradientBuffer&&) = default;
  GradientBuffer(const GradientBuffer&) = delete;

  const GradientBufferOptions& options() const { return options_; }
  void SetScaling(GradientScaling scaling) { options_.scaling = scaling; }
  const GradientScaling& scaling() const { return options_.scaling; }

  // Returns the layout of what is trained, and of what `with` has; null if that
  // is nothing. It is the same object as long as the layout is the same.
  Layout CurrentLayout(const Layout& with = nullptr) const;
  // Returns the size of a buffer with that layout; 0 without one.
  int64_t bytes() const;
  // Returns the size of the shard's gradient for what is trained; 0 for
  // nothing.
  int64_t shard_bytes() const;

  // Return 1-D views of a buffer's memory: all of it, or this rank's segment.
  at::Tensor Whole(const ReduceBuffer& buffer) const;
  at::Tensor OwnSegment(const ReduceBuffer& buffer) const;

  // Writes every element of the buffer. gradients[i] belongs to parameter i. It
  // is undefined, sparse, or of the parameter's shape with any strides (also
  // expanded). It is ignored if the layout lacks the parameter.
  void Fill(ReduceBuffer& buffer, absl::Span<const at::Tensor> gradients) const;
  // As Fill(), but adds to what an earlier Fill() has left in the buffer.
  void Add(ReduceBuffer& buffer, absl::Span<const at::Tensor> gradients) const;
  // Writes every element of `to` from what `from` has of the same parameters.
  void Convert(const ReduceBuffer& from, ReduceBuffer& to) const;
  // Adds this rank's segment of `from` to that of `to`, matching parameters as
  // Convert() does.
  void AddSegment(const ReduceBuffer& from, ReduceBuffer& to) const;

 private:
  void CopyParameters(const ReduceBuffer& from, ReduceBuffer& to,
                      bool adds) const;
  void PackInto(ReduceBuffer& buffer, absl::Span<const at::Tensor> gradients,
                bool adds) const;

  flat_param::FlatParameter* const parameter_;
  GradientBufferOptions options_;
  mutable Layout layout_;  // of the last CurrentLayout()
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_GRADIENT_BUFFER_H_
