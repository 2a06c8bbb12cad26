// Numbers in device memory, with the conversions and roundings of the CPU's
// kernels.
#ifndef DEVICE_OPS_CUDA_ELEMENT_CUH_
#define DEVICE_OPS_CUDA_ELEMENT_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device_ops/cuda/element.h"

namespace fsdp::device_ops {

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
__device__ Vector<T, kSize> Load(const T* from) {
  return *reinterpret_cast<const Vector<T, kSize>*>(from);
}

template <typename T, int kSize>
__device__ void Store(const Vector<T, kSize>& vector, T* to) {
  *reinterpret_cast<Vector<T, kSize>*>(to) = vector;
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

}  // namespace fsdp::device_ops

#endif  // DEVICE_OPS_CUDA_ELEMENT_CUH_
