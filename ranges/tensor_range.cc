#include "ranges/tensor_range.h"

#include <c10/core/GradMode.h>
#include <c10/core/Layout.h>

#include <algorithm>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "flat_param/flat_parameter.h"

namespace fsdp {

TensorRange TensorRange::With(at::Tensor elements) const {
  TensorRange range = *this;
  range.values = std::move(elements);
  return range;
}

bool TensorRange::IsRowMajor() const {
  if (absl::c_linear_search(sizes, 0)) return true;
  const std::vector<int64_t> row_major = RowMajorStrides(sizes);
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && strides[d] != row_major[d]) return false;
  }
  return true;
}

at::Tensor TensorRange::RowMajorValues() const {
  if (!is_whole) return IsRowMajor() ? values : at::Tensor();
  const bool is_plain =
      values.layout() == c10::kStrided && values.is_contiguous();
  return is_plain ? values.detach().view({-1}) : at::Tensor();
}

TensorRange WholeRange(std::string name, const at::Tensor& tensor) {
  TensorRange range{std::move(name), {}, {}, /*begin=*/0, tensor};
  range.is_whole = true;
  if (!tensor.defined()) return range;
  range.sizes = tensor.sizes().vec();
  if (tensor.layout() == c10::kStrided) range.strides = tensor.strides().vec();
  return range;
}

std::pair<int64_t, int64_t> EvenPart(int64_t count, int index, int parts) {
  const auto begin = [=](int64_t i) {
    return count / parts * i + std::min(count % parts, i);
  };
  return {begin(index), begin(index + 1)};
}

std::vector<int64_t> RowMajorStrides(absl::Span<const int64_t> sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

absl::Status CheckCovered(absl::Span<const TensorRange* const> pieces,
                          int64_t begin, int64_t end) {
  std::vector<const TensorRange*> sorted(pieces.begin(), pieces.end());
  std::sort(sorted.begin(), sorted.end(),
            [](const TensorRange* a, const TensorRange* b) {
              return a->begin < b->begin;
            });
  int64_t covered = begin;
  for (const TensorRange* piece : sorted) {
    if (piece->begin > covered) break;
    covered = std::max(covered, piece->end());
  }
  if (covered >= end) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("no piece has element ", covered));
}

void CopyFromPieces(absl::Span<const TensorRange* const> pieces,
                    const TensorRange& target) {
  const c10::NoGradGuard no_grad;
  const at::Tensor values = target.values.detach();
  for (const TensorRange* piece : pieces) {
    const int64_t from = std::max(target.begin, piece->begin);
    const int64_t to = std::min(target.end(), piece->end());
    if (from >= to) continue;
    const at::Tensor source =
        piece->is_whole
            ? flat_param::StorageOrderOf(
                  piece->values, {target.name, target.sizes, target.strides})
            : piece->values;
    values.narrow(0, from - target.begin, to - from)
        .copy_(source.narrow(0, from - piece->begin, to - from));
  }
}

}  // namespace fsdp
