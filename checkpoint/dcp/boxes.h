// Boxes of a tensor: what PyTorch's Distributed Checkpoint calls chunks.
#ifndef CHECKPOINT_DCP_BOXES_H_
#define CHECKPOINT_DCP_BOXES_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace fsdp::checkpoint {

struct DcpBox {
  std::vector<int64_t> offsets;  // of each dimension
  std::vector<int64_t> sizes;

  // Fits in 64 bits where the box is inside of a tensor that does.
  int64_t Numel() const;
};

// The elements [begin, end) of a row-major tensor as boxes, in memory order and
// back to back: at most 2d - 1, and none of an empty range. 0 <= begin <= end
// <= the tensor's elements.
std::vector<DcpBox> RangeToBoxes(absl::Span<const int64_t> shape, int64_t begin,
                                 int64_t end);

// A box of RangeToBoxes() by rows (or what rows are made of) into pieces of at
// most `max_elements` >= 1, in memory order.
std::vector<DcpBox> SplitBox(absl::Span<const int64_t> shape, const DcpBox& box,
                             int64_t max_elements);

// InvalidArgument where the boxes do not cover each element of the tensor
// exactly once; boxes without elements do not matter. O(boxes * 2^k), where k
// <= 6 dimensions are split; more are refused.
absl::Status CheckCover(absl::Span<const int64_t> shape,
                        absl::Span<const DcpBox> boxes);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_DCP_BOXES_H_
