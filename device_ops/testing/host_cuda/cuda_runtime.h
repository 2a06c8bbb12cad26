// Has the toolkit's name: the language of our kernels, for a C++ compiler. It
// lacks what they do not use: dynamic shared memory and atomics.
#ifndef DEVICE_OPS_TESTING_HOST_CUDA_CUDA_RUNTIME_H_
#define DEVICE_OPS_TESTING_HOST_CUDA_CUDA_RUNTIME_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#include "device_ops/testing/host_cuda/cuda_runtime_api.h"
#include "device_ops/testing/host_cuda/kernel_machine.h"

// NOLINTBEGIN: the names are CUDA's.
#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
// Blocks run one after the other. As on a GPU, a block must not rely on what it
// finds there: it is what the last block left.
#define __shared__ static

inline void __syncthreads(int line = __builtin_LINE()) {
  fsdp::device_ops::testing::KernelMachine::Get().SyncBlock(line);
}

// Exchanges values of 32 or 64 bits within the whole warp.
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask,
                  int line = __builtin_LINE()) {
  uint64_t bits = 0;
  static_assert(sizeof(T) <= sizeof(bits));
  std::memcpy(&bits, &value, sizeof(T));
  bits = fsdp::device_ops::testing::KernelMachine::Get().ExchangeByXor(
      mask, bits, static_cast<unsigned>(lane_mask), line);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <typename... Expected, typename... Actual>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config,
                               void (*kernel)(Expected...), Actual&&... args) {
  static_assert((sizeof(Expected) + ... + 0) <= 32764, "too many arguments");
  const std::tuple<Expected...> arguments(std::forward<Actual>(args)...);
  return fsdp::device_ops::testing::KernelMachine::Get().Launch(
      *config, [&] { std::apply(kernel, arguments); });
}

// These round each operation, since the build does not contract a * b + c.
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __double2float_rn(double a) { return static_cast<float>(a); }
inline int __float2int_rn(float a) {
  return static_cast<int>(std::nearbyintf(a));
}

inline uint32_t __float_as_uint(float a) {
  uint32_t bits;
  std::memcpy(&bits, &a, sizeof(bits));
  return bits;
}
inline float __uint_as_float(uint32_t a) {
  float value;
  std::memcpy(&value, &a, sizeof(value));
  return value;
}

inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}

// Returns the low word of high:low >> shift, where the last five bits of
// `shift` count.
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>(((static_cast<uint64_t>(high) << 32) | low) >>
                               (shift % 32));
}

inline uint32_t max(uint32_t a, uint32_t b) { return a < b ? b : a; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
// NOLINTEND

#endif  // DEVICE_OPS_TESTING_HOST_CUDA_CUDA_RUNTIME_H_
