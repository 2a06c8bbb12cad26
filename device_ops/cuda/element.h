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

}  // namespace fsdp::device_ops::cuda

#endif  // DEVICE_OPS_CUDA_ELEMENT_H_
