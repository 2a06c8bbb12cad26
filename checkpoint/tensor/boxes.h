// Boxes of row-major tensors: they describe a range of elements to formats that
// know only rectangles.
#ifndef CHECKPOINT_TENSOR_BOXES_H_
#define CHECKPOINT_TENSOR_BOXES_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace fsdp::checkpoint {

// The elements whose index in each dimension i lies in [offsets[i], offsets[i]
// + sizes[i]). Both have an entry per dimension, and none for a scalar.
struct Box {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;

  // Returns the number of elements. It does not overflow if the box is inside a
  // tensor that NumelOf() accepts.
  int64_t Numel() const;

  friend bool operator==(const Box& a, const Box& b) {
    return a.offsets == b.offsets && a.sizes == b.sizes;
  }
};

// Returns the boxes that hold the elements [begin, end) of a row-major tensor:
// at most 2 d - 1 for d dimensions, 1 for a scalar, none for an empty range.
// They are in the order of the elements, so that their contents lie back to
// back as the range's do. `shape` is that of a TensorInfo that NumelOf()
// accepts, with 0 <= begin <= end <= numel.
std::vector<Box> RangeToBoxes(absl::Span<const int64_t> shape, int64_t begin,
                              int64_t end);

// InvalidArgument, saying why: the box is not inside a tensor of this shape.
absl::Status CheckInBounds(absl::Span<const int64_t> shape, const Box& box);

// Checks that every element of the tensor is in exactly one of `boxes`, each of
// which CheckInBounds() accepts. InvalidArgument names the first element that
// is in none or in several. Time and memory grow with the number of boxes times
// 2 to the number of dimensions that are cut, times a logarithm; more than 16
// million corners are refused.
absl::Status CheckTiles(absl::Span<const int64_t> shape,
                        absl::Span<const Box> boxes);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_TENSOR_BOXES_H_
