// Has the toolkit's name: bfloat16, by its definition.
#ifndef DEVICE_OPS_TESTING_HOST_CUDA_CUDA_BF16_H_
#define DEVICE_OPS_TESTING_HOST_CUDA_CUDA_BF16_H_

#include <cmath>
#include <cstdint>
#include <cstring>

// NOLINTBEGIN: the names are CUDA's.
struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// Rounds to the nearest number, ties to even.
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  if (std::isnan(value)) return {0x7fff};
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t cut = bits & 0xffff;
  uint32_t kept = bits >> 16;
  if (cut > 0x8000 || (cut == 0x8000 && kept % 2 == 1)) ++kept;
  return {static_cast<uint16_t>(kept)};
}
// NOLINTEND

#endif  // DEVICE_OPS_TESTING_HOST_CUDA_CUDA_BF16_H_
