#include "base/tensor_over.h"

#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>

#include "base/check.h"

namespace fsdp {

at::Tensor TensorOver(const c10::Storage& storage, int64_t offset,
                      c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      c10::ScalarType dtype) {
  const c10::DispatchKeySet keys(
      c10::computeDispatchKey(dtype, c10::kStrided, storage.device()));
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), keys, c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

at::Tensor RangeOf(const at::Tensor& whole, c10::ScalarType dtype,
                   int64_t begin, int64_t numel) {
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t offset =
      whole.storage_offset() * static_cast<int64_t>(whole.element_size());
  FSDP_CHECK(whole.is_contiguous() && offset % size == 0 && begin >= 0 &&
             numel >= 0 &&
             (begin + numel) * size <= static_cast<int64_t>(whole.nbytes()));
  return TensorOver(whole.storage(), offset / size + begin, {numel}, {1},
                    dtype);
}

}  // namespace fsdp
