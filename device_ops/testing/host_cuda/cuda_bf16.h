// Has the toolkit's name: bfloat16, whose bits are those of LibTorch's.
#ifndef DEVICE_OPS_TESTING_HOST_CUDA_CUDA_BF16_H_
#define DEVICE_OPS_TESTING_HOST_CUDA_CUDA_BF16_H_

#include <c10/util/BFloat16.h>

#include <cstdint>

// NOLINTBEGIN: the names are CUDA's.

struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 value) {
  return c10::BFloat16(value.bits, c10::BFloat16::from_bits());
}

// Rounds to the nearest number, ties to even.
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  return {c10::BFloat16(value).x};
}

// NOLINTEND

#endif  // DEVICE_OPS_TESTING_HOST_CUDA_CUDA_BF16_H_
