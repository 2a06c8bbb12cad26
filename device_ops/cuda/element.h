// The dtypes that the kernels know, for code that knows no CUDA types.
#ifndef DEVICE_OPS_CUDA_ELEMENT_H_
#define DEVICE_OPS_CUDA_ELEMENT_H_

#include <cstdint>

namespace fsdp::device_ops::cuda {

enum class Element : uint8_t { kFloat, kDouble, kHalf, kBFloat16 };

}  // namespace fsdp::device_ops::cuda

#endif  // DEVICE_OPS_CUDA_ELEMENT_H_
