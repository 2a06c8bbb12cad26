#include <cuda_runtime.h>

#include <algorithm>

#include "device_ops/cuda/device.cuh"
#include "device_ops/cuda/kernels.h"

namespace fsdp::device_ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kVector = 8;
constexpr unsigned kAllLanes = 0xffffffff;
// A grid has at most this many times the blocks of threads that a device runs
// at once; each of them takes further work until all is done.
constexpr int kWaves = 8;
constexpr float kLargestValue = 127;
constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint32_t kNan = 0x7fc00000;

int64_t NumBlocks(int64_t numel, int64_t block) {
  return numel / block + (numel % block == 0 ? 0 : 1);
}

cudaError_t FindGrid(int64_t threads, unsigned* blocks) {
  unsigned resident = 0;
  const cudaError_t error = ResidentBlocks(kThreads, &resident);
  *blocks = static_cast<unsigned>(std::min<int64_t>(
      (threads + kThreads - 1) / kThreads, int64_t{kWaves} * resident));
  return error;
}

// The bits of absolute values are ordered as the values, NaN above all.
template <typename In>
__device__ uint32_t AbsoluteBits(In value) {
  return __float_as_uint(ToFloat(value)) & 0x7fffffff;
}

// Returns the largest bits of a block in all lanes of the warp.
template <typename In>
__device__ uint32_t LargestBits(const In* in, int numel, int vectors,
                                int lane) {
  uint32_t largest = 0;
#pragma unroll 1
  for (int i = lane; i < vectors; i += kWarp) {
    const Vector<In, kVector> loaded =
        LoadVector<In, kVector>(in + i * kVector);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      largest = max(largest, AbsoluteBits(loaded.elements[k]));
    }
  }
#pragma unroll 1
  for (int i = vectors * kVector + lane; i < numel; i += kWarp) {
    largest = max(largest, AbsoluteBits(in[i]));
  }
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, offset));
  }
  return largest;
}

__device__ int8_t Rounded(float value, float scale) {
  if (!(scale > 0)) return 0;
  const float quotient = __fdiv_rn(value, scale);
  const float bounded = fminf(fmaxf(quotient, -kLargestValue), kLargestValue);
  return static_cast<int8_t>(__float2int_rn(bounded));
}

// Takes a warp for each block of numbers, which it reads again from its cache.
// The loops are not unrolled, so that there can be more warps: blocks are
// short, and registers would limit the number of warps.
template <typename In>
__global__ void __launch_bounds__(kThreads)
    QuantizeKernel(BlockRows rows, int64_t blocks, Divider by_blocks,
                   bool vectorised, const In* in, int8_t* values,
                   float* scales) {
  const int lane = threadIdx.x % kWarp;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  int64_t index = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) +
                  threadIdx.x / kWarp;
  for (; index < rows.rows * blocks; index += step) {
    const int64_t row = by_blocks.Quotient(index);
    const int64_t number = index - row * blocks;  // of the block in its row
    const int64_t first = number * rows.block;
    const int64_t left = rows.numel - first;
    const int numel = static_cast<int>(left < rows.block ? left : rows.block);
    const int vectors = vectorised ? numel / kVector : 0;
    const In* const from = in + row * rows.number_stride + first;
    int8_t* const to = values + row * rows.value_row_stride + first;
    const uint32_t largest = LargestBits(from, numel, vectors, lane);
    const float scale = largest < kInfinity
                            ? __fdiv_rn(__uint_as_float(largest), kLargestValue)
                            : __uint_as_float(kNan);
#pragma unroll 1
    for (int i = lane; i < vectors; i += kWarp) {
      const Vector<In, kVector> loaded =
          LoadVector<In, kVector>(from + i * kVector);
      Vector<int8_t, kVector> rounded;
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        rounded.elements[k] = Rounded(ToFloat(loaded.elements[k]), scale);
      }
      StoreVector<int8_t, kVector>(rounded, to + i * kVector);
    }
#pragma unroll 1
    for (int i = vectors * kVector + lane; i < numel; i += kWarp) {
      to[i] = Rounded(ToFloat(from[i]), scale);
    }
    if (lane == 0) scales[row * rows.scale_row_stride + number] = scale;
  }
}

// Returns the sums over the terms for `kSize` elements of one block.
template <int kSize>
__device__ Vector<float, kSize> SumOf(const BlockRows& rows,
                                      const int8_t* values,
                                      const float* scales) {
  Vector<float, kSize> sums{};
  for (int64_t term = 0; term < rows.terms; ++term) {
    const float scale = scales[term * rows.scale_term_stride];
    const Vector<int8_t, kSize> loaded =
        LoadVector<int8_t, kSize>(values + term * rows.value_term_stride);
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      const float value =
          Multiply(static_cast<float>(loaded.elements[k]), scale);
      sums.elements[k] = term == 0 ? value : Add(sums.elements[k], value);
    }
  }
  return sums;
}

// Takes a thread for `kSize` neighbours of a row, in one block.
template <bool kAccumulate, int kSize, typename Out>
__global__ void __launch_bounds__(kThreads)
    DequantizeKernel(BlockRows rows, int64_t vectors, Divider by_vectors,
                     Divider by_block, Out* out, const int8_t* values,
                     const float* scales, double factor) {
  using Computed = Wider<float, Out>;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; index < rows.rows * vectors; index += step) {
    const int64_t row = by_vectors.Quotient(index);
    const int64_t first = (index - row * vectors) * kSize;
    const Vector<float, kSize> sums = SumOf<kSize>(
        rows, values + row * rows.value_row_stride + first,
        scales + row * rows.scale_row_stride + by_block.Quotient(first));
    Out* const to = out + row * rows.number_stride + first;
    Vector<Out, kSize> result{};
    if constexpr (kAccumulate) result = LoadVector<Out, kSize>(to);
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      Computed used = Multiply(static_cast<Computed>(factor),
                               static_cast<Computed>(sums.elements[k]));
      if constexpr (kAccumulate) {
        used = Add(Widen<Computed>(result.elements[k]), used);
      }
      result.elements[k] = Narrow<Out>(used);
    }
    StoreVector<Out, kSize>(result, to);
  }
}

template <int kSize, typename Out>
cudaError_t DequantizeTyped(const BlockRows& rows, Out* out,
                            const int8_t* values, const float* scales,
                            double factor, bool accumulate,
                            cudaStream_t stream) {
  const int64_t vectors = rows.numel / kSize;
  unsigned grid = 0;
  const cudaError_t error = FindGrid(rows.rows * vectors, &grid);
  if (error != cudaSuccess) return error;
  return Launch(accumulate ? &DequantizeKernel<true, kSize, Out>
                           : &DequantizeKernel<false, kSize, Out>,
                grid, kThreads, stream, rows, vectors, Divider(vectors),
                Divider(rows.block), out, values, scales, factor);
}

// Returns whether all vectors of all rows begin at an address for one load.
template <typename T>
bool IsVectorised(const T* data, int64_t stride, int64_t rows) {
  return IsAligned<T, kVector>(data) && (rows == 1 || stride % kVector == 0);
}

}  // namespace

cudaError_t LaunchQuantize(const BlockRows& rows, Element in_type,
                           const void* in, int8_t* values, float* scales,
                           cudaStream_t stream) {
  const int64_t blocks = NumBlocks(rows.numel, rows.block);
  if (rows.rows * blocks == 0) return cudaSuccess;
  unsigned grid = 0;
  const cudaError_t error = FindGrid(rows.rows * blocks * kWarp, &grid);
  if (error != cudaSuccess) return error;
  return WithType(in_type, [&](auto type) {
    using In = decltype(type);
    const In* const from = static_cast<const In*>(in);
    const bool vectorised =
        rows.block % kVector == 0 &&
        IsVectorised(from, rows.number_stride, rows.rows) &&
        IsVectorised(values, rows.value_row_stride, rows.rows);
    return Launch(&QuantizeKernel<In>, grid, kThreads, stream, rows, blocks,
                  Divider(blocks), vectorised, from, values, scales);
  });
}

cudaError_t LaunchDequantize(const BlockRows& rows, Element out_type, void* out,
                             const int8_t* values, const float* scales,
                             double factor, bool accumulate,
                             cudaStream_t stream) {
  if (rows.rows * rows.numel == 0) return cudaSuccess;
  return WithType(out_type, [&](auto type) {
    using Out = decltype(type);
    Out* const to = static_cast<Out*>(out);
    const bool vectorised =
        rows.block % kVector == 0 && rows.numel % kVector == 0 &&
        IsVectorised(to, rows.number_stride, rows.rows) &&
        IsVectorised(values, rows.value_row_stride, rows.rows) &&
        IsVectorised(values, rows.value_term_stride, rows.terms);
    if (vectorised) {
      return DequantizeTyped<kVector>(rows, to, values, scales, factor,
                                      accumulate, stream);
    }
    return DequantizeTyped<1>(rows, to, values, scales, factor, accumulate,
                              stream);
  });
}

}  // namespace fsdp::device_ops::cuda
