// Has the toolkit's name: float16, by its definition.
#ifndef DEVICE_OPS_TESTING_HOST_CUDA_CUDA_FP16_H_
#define DEVICE_OPS_TESTING_HOST_CUDA_CUDA_FP16_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

// NOLINTBEGIN: the names are CUDA's.
struct __half {
  uint16_t bits;
};

inline float __half2float(__half half) {
  const float sign = (half.bits & 0x8000) != 0 ? -1.0f : 1.0f;
  const int exponent = half.bits >> 10 & 31;
  const int fraction = half.bits & 1023;
  if (exponent == 31) {
    return sign * (fraction == 0 ? std::numeric_limits<float>::infinity()
                                 : std::numeric_limits<float>::quiet_NaN());
  }
  const int units = exponent == 0 ? fraction : 1024 + fraction;
  return sign *
         static_cast<float>(std::ldexp(units, std::max(exponent, 1) - 25));
}

// Rounds to the nearest number, ties to even.
inline __half __float2half_rn(float value) {
  if (std::isnan(value)) return {0x7fff};
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  // The limit lies between the largest number and what would be the next one.
  if (magnitude >= 65520) return {static_cast<uint16_t>(sign | 0x7c00)};
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  // The exponent of the last place is at least that of subnormal numbers.
  const int unit = magnitude == 0 ? -24 : std::max(exponent - 11, -24);
  const auto units =
      static_cast<int>(std::nearbyint(std::ldexp(magnitude, -unit)));
  return {static_cast<uint16_t>(sign | (((unit + 24) << 10) + units))};
}
// NOLINTEND

#endif  // DEVICE_OPS_TESTING_HOST_CUDA_CUDA_FP16_H_
