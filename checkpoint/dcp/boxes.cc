#include "checkpoint/dcp/boxes.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"

namespace fsdp::checkpoint {
namespace {

constexpr size_t kMaxSplitDims = 6;
using Corner = std::array<int64_t, kMaxSplitDims>;

// Elements of one step of dimension `dim`.
int64_t Inner(absl::Span<const int64_t> shape, size_t dim) {
  int64_t inner = 1;
  for (size_t i = dim + 1; i < shape.size(); ++i) inner *= shape[i];
  return inner;
}

// Rows [first, last) of dimension `dim`, with all that is below them.
DcpBox Rows(absl::Span<const int64_t> shape, const std::vector<int64_t>& fixed,
            size_t dim, int64_t first, int64_t last) {
  DcpBox box;
  box.offsets.assign(shape.size(), 0);
  box.sizes.assign(shape.begin(), shape.end());
  for (size_t i = 0; i < dim; ++i) {
    box.offsets[i] = fixed[i];
    box.sizes[i] = 1;
  }
  box.offsets[dim] = first;
  box.sizes[dim] = last - first;
  return box;
}

// [begin, end) of what is below the first `fixed.size()` indices. Recurses once
// for a dimension.
void AddRange(absl::Span<const int64_t> shape, std::vector<int64_t>& fixed,
              int64_t begin, int64_t end, std::vector<DcpBox>& boxes) {
  if (begin == end) return;
  const size_t dim = fixed.size();
  const int64_t inner = Inner(shape, dim);
  const auto below = [&](int64_t row, int64_t from, int64_t to) {
    fixed.push_back(row);
    AddRange(shape, fixed, from, to, boxes);
    fixed.pop_back();
  };
  int64_t first = begin / inner;
  const int64_t last = end / inner;
  if (first == last) return below(first, begin % inner, end % inner);
  if (begin % inner != 0) below(first++, begin % inner, inner);
  if (first < last) boxes.push_back(Rows(shape, fixed, dim, first, last));
  if (end % inner != 0) below(last, 0, end % inner);
}

// The dimensions that not all boxes span.
std::vector<size_t> SplitDims(absl::Span<const int64_t> shape,
                              absl::Span<const DcpBox> boxes) {
  std::vector<size_t> dims;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    const bool is_split = std::any_of(
        boxes.begin(), boxes.end(),
        [&](const DcpBox& box) { return box.sizes[dim] != shape[dim]; });
    if (is_split) dims.push_back(dim);
  }
  return dims;
}

absl::Status CheckInside(absl::Span<const int64_t> shape, const DcpBox& box) {
  bool is_inside =
      box.offsets.size() == shape.size() && box.sizes.size() == shape.size();
  for (size_t i = 0; is_inside && i < shape.size(); ++i) {
    is_inside = box.sizes[i] >= 0 && box.offsets[i] >= 0 &&
                box.offsets[i] <= shape[i] &&
                box.sizes[i] <= shape[i] - box.offsets[i];
  }
  if (is_inside) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("chunk [", absl::StrJoin(box.sizes, ", "), "] at [",
                   absl::StrJoin(box.offsets, ", "), "] is not inside of it"));
}

}  // namespace

int64_t DcpBox::Numel() const {
  int64_t numel = 1;
  for (const int64_t size : sizes) {
    if (size == 0) return 0;
  }
  for (const int64_t size : sizes) numel *= size;
  return numel;
}

std::vector<DcpBox> RangeToBoxes(absl::Span<const int64_t> shape, int64_t begin,
                                 int64_t end) {
  std::vector<DcpBox> boxes;
  if (begin == end) return boxes;
  if (shape.empty()) {
    boxes.emplace_back();
    return boxes;
  }
  std::vector<int64_t> fixed;
  AddRange(shape, fixed, begin, end, boxes);
  return boxes;
}

std::vector<DcpBox> SplitBox(absl::Span<const int64_t> shape, const DcpBox& box,
                             int64_t max_elements) {
  FSDP_CHECK(max_elements >= 1);
  if (box.Numel() <= max_elements) return {box};
  // The first dimension of more than one row; it is there, or the box would
  // have one element.
  size_t dim = 0;
  while (box.sizes[dim] == 1) ++dim;
  const int64_t inner = Inner(shape, dim);
  const int64_t rows = std::max<int64_t>(1, max_elements / inner);
  std::vector<DcpBox> pieces;
  for (int64_t first = 0; first < box.sizes[dim]; first += rows) {
    DcpBox piece = box;
    piece.offsets[dim] += first;
    piece.sizes[dim] = std::min(rows, box.sizes[dim] - first);
    for (DcpBox& part : SplitBox(shape, piece, max_elements)) {
      pieces.push_back(std::move(part));
    }
  }
  return pieces;
}

// Boxes cover the tensor once if and only if the sum of their indicator
// functions is its own. A box's function is known by its corners with signs:
// they are its difference along each dimension, which loses nothing.
absl::Status CheckCover(absl::Span<const int64_t> shape,
                        absl::Span<const DcpBox> boxes) {
  std::vector<DcpBox> all;
  for (const DcpBox& box : boxes) {
    if (absl::Status inside = CheckInside(shape, box); !inside.ok()) {
      return inside;
    }
    if (box.Numel() > 0) all.push_back(box);
  }
  const std::vector<size_t> dims = SplitDims(shape, all);
  if (dims.size() > kMaxSplitDims) {
    return absl::InvalidArgumentError(absl::StrCat("its chunks split ",
                                                   dims.size(), " dimensions; ",
                                                   kMaxSplitDims, " are read"));
  }
  absl::flat_hash_map<Corner, int64_t> corners;
  const auto add = [&](const DcpBox& box, int64_t sign) {
    for (size_t mask = 0; mask < size_t{1} << dims.size(); ++mask) {
      Corner corner{};
      int64_t signs = sign;
      for (size_t i = 0; i < dims.size(); ++i) {
        const bool is_end = ((mask >> i) & 1) != 0;
        corner[i] = box.offsets[dims[i]] + (is_end ? box.sizes[dims[i]] : 0);
        if (is_end) signs = -signs;
      }
      const auto found = corners.try_emplace(corner, 0).first;
      found->second += signs;
      if (found->second == 0) corners.erase(found);
    }
  };
  const DcpBox whole = {std::vector<int64_t>(shape.size(), 0),
                        {shape.begin(), shape.end()}};
  if (whole.Numel() > 0) add(whole, -1);
  for (const DcpBox& box : all) add(box, 1);
  if (corners.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "its chunks do not have each element exactly once");
}

}  // namespace fsdp::checkpoint
