// The layout of a unit's trained parameters' gradients for one reduce-scatter.
// It is pure arithmetic.
#ifndef FSDP_RUNTIME_GRADIENT_LAYOUT_H_
#define FSDP_RUNTIME_GRADIENT_LAYOUT_H_

#include <cstdint>
#include <vector>

#include "flat_param/layout.h"

namespace fsdp {

// The buffer has one segment per rank, all as long as the longest:
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

}  // namespace fsdp

#endif  // FSDP_RUNTIME_GRADIENT_LAYOUT_H_
