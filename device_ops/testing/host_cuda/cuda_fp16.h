// Has the toolkit's name: float16, whose bits are those of LibTorch's.
#ifndef DEVICE_OPS_TESTING_HOST_CUDA_CUDA_FP16_H_
#define DEVICE_OPS_TESTING_HOST_CUDA_CUDA_FP16_H_

#include <c10/util/Half.h>

#include <cstdint>

// NOLINTBEGIN: the names are CUDA's.

struct __half {
  uint16_t bits;
};

inline float __half2float(__half half) {
  return c10::Half(half.bits, c10::Half::from_bits());
}

// Rounds to the nearest number, ties to even.
inline __half __float2half_rn(float value) { return {c10::Half(value).x}; }

// NOLINTEND

#endif  // DEVICE_OPS_TESTING_HOST_CUDA_CUDA_FP16_H_
