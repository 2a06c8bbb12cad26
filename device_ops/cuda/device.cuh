// Kernels share these: numbers in device memory, with the conversions and
// roundings of the CPU's kernels, and how kernels are launched.
#ifndef DEVICE_OPS_CUDA_DEVICE_CUH_
#define DEVICE_OPS_CUDA_DEVICE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "device_ops/cuda/kernels.h"

namespace fsdp::device_ops::cuda {

__device__ inline float ToFloat(float value) { return value; }
__device__ inline float ToFloat(double value) {
  return __double2float_rn(value);
}
__device__ inline float ToFloat(__half value) { return __half2float(value); }
__device__ inline float ToFloat(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

template <typename To>
__device__ To FromFloat(float value);
template <>
__device__ inline float FromFloat(float value) {
  return value;
}
template <>
__device__ inline double FromFloat(float value) {
  return value;
}
template <>
__device__ inline __half FromFloat(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 FromFloat(float value) {
  return __float2bfloat16_rn(value);
}

template <typename A, typename B>
using Wider =
    std::conditional_t<std::is_same_v<A, double> || std::is_same_v<B, double>,
                       double, float>;

template <typename Computed, typename From>
__device__ Computed Widen(From value) {
  if constexpr (std::is_same_v<From, double>) {
    return value;
  } else {
    return ToFloat(value);
  }
}

template <typename To, typename Computed>
__device__ To Narrow(Computed value) {
  if constexpr (std::is_same_v<To, double>) {
    return value;
  } else {
    return FromFloat<To>(ToFloat(value));
  }
}

// Not fused: the product is rounded, as on the CPU.
__device__ inline float Multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double Multiply(double a, double b) {
  return __dmul_rn(a, b);
}
__device__ inline float Add(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double Add(double a, double b) { return __dadd_rn(a, b); }

// `kSize` neighbours, moved by as few instructions as there are.
template <typename T, int kSize>
struct alignas(sizeof(T) * kSize < 16 ? sizeof(T) * kSize : 16) Vector {
  T elements[kSize];
};

template <typename T, int kSize>
__device__ Vector<T, kSize> LoadVector(const T* from) {
  return *reinterpret_cast<const Vector<T, kSize>*>(from);
}

template <typename T, int kSize>
__device__ void StoreVector(const Vector<T, kSize>& vector, T* to) {
  *reinterpret_cast<Vector<T, kSize>*>(to) = vector;
}

// One load brings so many words at most.
struct alignas(16) Words {
  uint32_t words[4];
};

// As many elements as there are in 16 bytes, from `bytes` behind `aligned` on,
// 0 <= bytes < 16. Reads the 32 bytes from `aligned` on.
template <typename T>
__device__ Vector<T, 16 / sizeof(T)> LoadShifted(const char* aligned,
                                                 int bytes) {
  const auto* const from = reinterpret_cast<const Words*>(aligned);
  const Words low = from[0];
  const Words high = from[1];
  uint32_t words[8] = {low.words[0],  low.words[1],  low.words[2],
                       low.words[3],  high.words[0], high.words[1],
                       high.words[2], high.words[3]};
  // By whole words, without an index that the compiler does not know: that
  // would send them through memory.
  if ((bytes & 8) != 0) {
#pragma unroll
    for (int k = 0; k < 6; ++k) words[k] = words[k + 2];
  }
  if ((bytes & 4) != 0) {
#pragma unroll
    for (int k = 0; k < 5; ++k) words[k] = words[k + 1];
  }
  Words shifted;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    shifted.words[k] = __funnelshift_r(words[k], words[k + 1], 8 * (bytes & 3));
  }
  Vector<T, 16 / sizeof(T)> loaded;
  memcpy(&loaded, &shifted, sizeof(loaded));
  return loaded;
}

template <typename T, int kSize>
__host__ __device__ bool IsAligned(const T* address) {
  return reinterpret_cast<uintptr_t>(address) % alignof(Vector<T, kSize>) == 0;
}

// Calls fn(T()) with the type in device memory.
template <typename Fn>
__host__ __device__ auto WithType(Element element, Fn fn) {
  switch (element) {
    case Element::kDouble:
      return fn(double());
    case Element::kHalf:
      return fn(__half());
    case Element::kBFloat16:
      return fn(__nv_bfloat16());
    case Element::kFloat:
      break;
  }
  return fn(float());
}

// Divides by what the host knows and the compiler does not, by a multiplication
// and a shift: a GPU has no instruction for divisions, and those of 64 bits take
// it about a hundred. Exact (Granlund and Montgomery, Division by Invariant
// Integers using Multiplication, 1994).
class Divider {
 public:
  // `divisor` > 0.
  explicit Divider(int64_t divisor) {
    const auto unsigned_divisor = static_cast<uint64_t>(divisor);
    while (uint64_t{1} << shift_ < unsigned_divisor) ++shift_;
    const uint64_t rest = (uint64_t{1} << shift_) - unsigned_divisor;
    multiplier_ = static_cast<uint64_t>(
        (static_cast<unsigned __int128>(rest) << 64) / unsigned_divisor + 1);
  }

  // number / divisor, 0 <= number.
  __device__ int64_t Quotient(int64_t number) const {
    const auto n = static_cast<uint64_t>(number);
    return static_cast<int64_t>((__umul64hi(n, multiplier_) + n) >> shift_);
  }

 private:
  uint64_t multiplier_;
  uint32_t shift_ = 0;
};

// --- Launches, by the runtime's function instead of <<<>>>, which only nvcc
// knows, so that tests can compile and run kernels on the host.

// How many blocks of `threads` threads the current device runs at once, where
// nothing else limits them.
inline cudaError_t ResidentBlocks(unsigned threads, unsigned* blocks) {
  constexpr unsigned kThreadsPerMultiprocessor = 2048;
  int device = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors,
                                   cudaDevAttrMultiProcessorCount, device);
  }
  *blocks = static_cast<unsigned>(multiprocessors) *
            (kThreadsPerMultiprocessor / threads);
  return error;
}

// `blocks` blocks of `threads` threads, on `stream`.
template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), unsigned blocks,
                   unsigned threads, cudaStream_t stream,
                   Arguments&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel,
                            std::forward<Arguments>(arguments)...);
}

}  // namespace fsdp::device_ops::cuda

#endif  // DEVICE_OPS_CUDA_DEVICE_CUH_
