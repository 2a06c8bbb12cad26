// Where the gradients of a unit's trained parameters lie on their way to one
// reduce-scatter. Pure arithmetic: no tensors.
#ifndef FSDP_RUNTIME_GRADIENT_LAYOUT_H_
#define FSDP_RUNTIME_GRADIENT_LAYOUT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "flat_param/layout.h"

namespace fsdp {

// The buffer has one segment per rank, all as long as the longest:
//
//   | gradients of what the rank's shard has | one flag per parameter | padding
//
// Both are of trained parameters alone, in the order of the shard and aligned
// as there, so that with all of them trained a segment is laid out as the shard
// is. Where trained parameters lie in one rank's shard, the others' segments
// are as long and have nothing but padding: at most, all are as long as a shard
// and the flags. Numbers are of elements. Immutable, hence thread-safe.
class GradientLayout {
 public:
  // `trained`: for each parameter of `layout`, which outlives this object.
  // `element_size`: of the buffer's elements, in bytes.
  GradientLayout(const flat_param::FlatLayout& layout,
                 std::vector<bool> trained, int64_t element_size);

  const std::vector<bool>& trained() const { return trained_; }
  // Indices, ascending.
  const std::vector<int>& parameters() const { return parameters_; }
  int num_flags() const { return static_cast<int>(parameters_.size()); }

  int world_size() const { return layout_.world_size(); }
  // Of one segment: gradients, which the flags follow, and all of it.
  int64_t gradients_numel() const { return gradients_numel_; }
  int64_t segment_numel() const { return segment_numel_; }
  int64_t numel() const { return segment_numel_ * world_size(); }
  int64_t bytes() const { return numel() * element_size_; }
  int64_t segment_bytes() const { return segment_numel_ * element_size_; }

  // Of trained parameter i, what the shard of `rank` has, in the rank's
  // segment; empty where that is nothing.
  flat_param::Slice InSegment(int i, int rank) const;
  // The ranks whose shards have some of parameter i.
  flat_param::Slice RanksOf(int i) const;
  // What no parameter covers before the flags, in the buffer.
  const std::vector<flat_param::Slice>& gaps() const { return gaps_; }

  // The most elements there are from the flags on in a segment of a buffer,
  // whatever is trained.
  static int64_t MostFlags(const flat_param::FlatLayout& layout,
                           int64_t element_size);

 private:
  void FindGaps();

  const flat_param::FlatLayout& layout_;
  const std::vector<bool> trained_;
  const int64_t element_size_;
  std::vector<int> parameters_;
  // Trained parameters one after the other: where each begins, by its index,
  // and where the shard of each rank does.
  std::vector<int64_t> begins_;
  std::vector<int64_t> shard_begins_;
  int64_t gradients_numel_ = 0;
  int64_t segment_numel_ = 0;
  std::vector<flat_param::Slice> gaps_;
};

// Copies of gradients, on the host by ways around operators where these cost
// more than the copy.

// Of contiguous tensors of one size. Multiplies in the wider of the two dtypes.
void CopyScaled(at::Tensor target, const at::Tensor& source, double scale);

// The same into a buffer of `buffer_bytes`, which is read only when other ranks
// are as far.
void CopyGradient(const at::Tensor& source, double scale, int64_t buffer_bytes,
                  const at::Tensor& target);

}  // namespace fsdp

#endif  // FSDP_RUNTIME_GRADIENT_LAYOUT_H_
