// Tensors over memory that is there already, made without running an operator:
// at a twentieth of the cost of narrow() and view(), unknown to autograd, and
// without a read of what may be armed against that.
#ifndef BASE_TENSOR_OVER_H_
#define BASE_TENSOR_OVER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace fsdp {

// `offset` and `strides` in elements of `dtype`.
at::Tensor TensorOver(const c10::Storage& storage, int64_t offset,
                      c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      c10::ScalarType dtype);

// Elements [begin, begin + numel) of the memory of `whole`, contiguous, seen as
// elements of `dtype`, 1-D. `whole` begins at a multiple of their size.
at::Tensor RangeOf(const at::Tensor& whole, c10::ScalarType dtype,
                   int64_t begin, int64_t numel);
inline at::Tensor RangeOf(const at::Tensor& whole, int64_t begin,
                          int64_t numel) {
  return RangeOf(whole, whole.scalar_type(), begin, numel);
}

}  // namespace fsdp

#endif  // BASE_TENSOR_OVER_H_
