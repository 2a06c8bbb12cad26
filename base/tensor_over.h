// Tensors over existing memory, made without running an operator. They cost a
// twentieth of narrow() and view(), are unknown to autograd, and need no read
// of memory that may be armed against reads.
#ifndef BASE_TENSOR_OVER_H_
#define BASE_TENSOR_OVER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace fsdp {

// Returns a view of `storage`. `offset` and `strides` are in elements of
// `dtype`.
at::Tensor TensorOver(const c10::Storage& storage, int64_t offset,
                      c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      c10::ScalarType dtype);

// Returns elements [begin, begin + numel) of the memory of `whole`, seen as 1-D
// elements of `dtype`. `whole` is contiguous and begins at a multiple of their
// size.
at::Tensor RangeOf(const at::Tensor& whole, c10::ScalarType dtype,
                   int64_t begin, int64_t numel);
inline at::Tensor RangeOf(const at::Tensor& whole, int64_t begin,
                          int64_t numel) {
  return RangeOf(whole, whole.scalar_type(), begin, numel);
}

}  // namespace fsdp

#endif  // BASE_TENSOR_OVER_H_
