// The dtypes and the arguments of the kernels, for code that knows no CUDA
// types.
#ifndef DEVICE_OPS_CUDA_ELEMENT_H_
#define DEVICE_OPS_CUDA_ELEMENT_H_

#include <cstdint>

namespace fsdp::device_ops::cuda {

enum class Element : uint8_t { kFloat, kDouble, kHalf, kBFloat16 };

// An argument of the kernel behind Pack().
// Sets out[begin + i] = scale * source[i] for 0 <= i < numel, numel > 0;
// without a source, to `value`, which is not scaled.
struct PackItem {
  const void* source;
  Element element;  // of the source
  int64_t begin;
  int64_t numel;
  float value;
};

// The arguments of the kernel behind RotateHalves(). `x` and `out` are [batch,
// heads, tokens, 2 * half], with strides of the first three in elements; a row
// of the last is contiguous. `cos` and `sin` are [tokens, 2 * half] and
// contiguous. `inverse` is that of libtorch_fsdp::rotate_halves_.
struct RotatedHeads {
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  int64_t half;
  int64_t x_strides[3];
  int64_t out_strides[3];
  const void* x;
  const void* cos;
  const void* sin;
  void* out;
  bool inverse;
};

}  // namespace fsdp::device_ops::cuda

#endif  // DEVICE_OPS_CUDA_ELEMENT_H_
