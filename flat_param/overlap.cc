#include "flat_param/overlap.h"

#include <algorithm>
#include <cstdint>
#include <tuple>

namespace fsdp::flat_param {

std::optional<std::pair<size_t, size_t>> FindOverlap(
    const std::vector<at::Tensor>& tensors) {
  struct Extent {
    const void* storage;
    int64_t begin;
    int64_t end;
    size_t tensor;
  };
  std::vector<Extent> extents;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (tensor.numel() == 0) continue;
    int64_t last = tensor.storage_offset();
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      last += (tensor.size(d) - 1) * tensor.stride(d);
    }
    extents.push_back({tensor.storage().unsafeGetStorageImpl(),
                       tensor.storage_offset(), last + 1, i});
  }
  std::sort(
      extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
        return std::tie(a.storage, a.begin) < std::tie(b.storage, b.begin);
      });
  for (size_t i = 1; i < extents.size(); ++i) {
    const Extent& a = extents[i - 1];
    const Extent& b = extents[i];
    if (a.storage == b.storage && a.end > b.begin) {
      return std::pair(a.tensor, b.tensor);
    }
  }
  return std::nullopt;
}

}  // namespace fsdp::flat_param
