#include "fsdp/memory/buffer_layout.h"

#include <ATen/ops/equal.h>
#include <c10/core/Layout.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace fsdp {
namespace {

bool IsKnown(c10::Layout layout) {
  return layout == c10::kStrided || layout == c10::kSparse ||
         layout == c10::kSparseCsr || layout == c10::kSparseCsc ||
         layout == c10::kSparseBsr || layout == c10::kSparseBsc;
}

bool IsExpanded(const at::Tensor& tensor, int64_t dim) {
  return tensor.stride(dim) == 0 && tensor.size(dim) > 1;
}

}  // namespace

absl::Status CheckCanBeSent(const std::string& name, const at::Tensor& buffer) {
  const auto refuse = [&](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat(
        "buffer ", name, " ", what,
        ", so that rank 0 cannot send it to the others: make it a dense "
        "tensor, or set Options::init.broadcast to false"));
  };
  if (buffer.is_meta()) return refuse("is on the meta device");
  if (buffer.is_nested() || !IsKnown(buffer.layout())) {
    return refuse("has no memory that is known");
  }
  if (buffer.layout() == c10::kStrided &&
      !SharesNoElements(DistinctOf(buffer))) {
    return refuse("is a view whose elements share memory");
  }
  return absl::OkStatus();
}

std::vector<at::Tensor> PartsOf(const at::Tensor& buffer) {
  switch (buffer.layout()) {
    case c10::kSparse:
      return {buffer._indices(), buffer._values()};
    case c10::kSparseCsr:
    case c10::kSparseBsr:
      return {buffer.crow_indices(), buffer.col_indices(), buffer.values()};
    case c10::kSparseCsc:
    case c10::kSparseBsc:
      return {buffer.ccol_indices(), buffer.row_indices(), buffer.values()};
    default:
      return {buffer};
  }
}

at::Tensor DistinctOf(const at::Tensor& tensor) {
  at::Tensor distinct = tensor;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (IsExpanded(tensor, d)) distinct = distinct.narrow(d, 0, 1);
  }
  return distinct;
}

// Each stride, from the smallest on, must step over all that the smaller ones
// reach.
bool SharesNoElements(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return false;
    reach += stride * (size - 1);
  }
  return true;
}

bool CanHold(const at::Tensor& target, const at::Tensor& value) {
  if (target.layout() != c10::kStrided || value.layout() != c10::kStrided) {
    return true;
  }
  for (int64_t d = 0; d < target.dim(); ++d) {
    if (IsExpanded(target, d) &&
        !at::equal(value, value.narrow(d, 0, 1).expand_as(value))) {
      return false;
    }
  }
  return true;
}

void CopyInto(const at::Tensor& target, const at::Tensor& value) {
  if (target.layout() != c10::kStrided) {
    target.copy_(value);
    return;
  }
  at::Tensor from = value;
  for (int64_t d = 0; d < target.dim(); ++d) {
    if (IsExpanded(target, d)) from = from.narrow(d, 0, 1);
  }
  DistinctOf(target.detach()).copy_(from);
}

std::string LayoutText(const at::Tensor& buffer) {
  std::string text =
      buffer.layout() == c10::kStrided ? "strided" : "sparse, parts of";
  if (buffer.layout() == c10::kStrided) return text;
  for (const at::Tensor& part : PartsOf(buffer)) {
    absl::StrAppend(&text, " [", absl::StrJoin(part.sizes(), ", "), "]");
  }
  return text;
}

}  // namespace fsdp
