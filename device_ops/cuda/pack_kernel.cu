#include <cuda_runtime.h>

#include <algorithm>

#include "device_ops/cuda/device.cuh"
#include "device_ops/cuda/kernels.h"

namespace fsdp::device_ops::cuda {
namespace {

constexpr int kThreads = 256;
// The elements of an item per step of a block of threads; keeps the alignment.
constexpr int kChunk = 8192;

// With few items, the arguments of a launch are short.
constexpr int kFewItems = 96;

// The items as arrays, so that threads that look for their item read little.
template <int kItems>
struct PackTable {
  // The number of chunks before each item; the last one counts all.
  uint32_t first_chunk[kItems + 1];
  int32_t count;
  const void* source[kItems];  // null: `value`
  int64_t begin[kItems];
  int64_t numel[kItems];
  uint8_t element[kItems];
  uint8_t is_one[kItems];
};

// Returns the last item whose chunks begin at `chunk` or before.
template <int kItems>
__device__ int ItemOf(const PackTable<kItems>& table, uint32_t chunk) {
  int low = 0;
  int high = table.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.first_chunk[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <bool kAccumulate, typename In, typename Out>
__device__ Out Scaled(In in, Out out, Wider<In, Out> scale) {
  using Computed = Wider<In, Out>;
  Computed result = Multiply(scale, Widen<Computed>(in));
  if constexpr (kAccumulate) result = Add(Widen<Computed>(out), result);
  return Narrow<Out>(result);
}

// Called by all threads of the block; load(i) is the source of vector i.
template <bool kAccumulate, typename In, int kSize, typename Out, typename Load>
__device__ void ScaleVectors(int vectors, Wider<In, Out> scale, Out* out,
                             const Load& load) {
  for (int i = threadIdx.x; i < vectors; i += kThreads) {
    const Vector<In, kSize> from = load(i);
    Vector<Out, kSize> to{};
    if constexpr (kAccumulate) to = LoadVector<Out, kSize>(out + i * kSize);
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      to.elements[k] =
          Scaled<kAccumulate>(from.elements[k], to.elements[k], scale);
    }
    StoreVector<Out, kSize>(to, out + i * kSize);
  }
}

// The elements of a chunk that are done by vectors, not one by one.
struct Body {
  int begin;
  int end;
};

// Returns the number of elements of `out` in front of the first vector.
template <int kSize, typename Out>
__device__ int HeadOf(const Out* out) {
  constexpr auto kAlignment = static_cast<int>(alignof(Vector<Out, kSize>));
  const auto past =
      static_cast<int>(reinterpret_cast<uintptr_t>(out) % kAlignment);
  return (kAlignment - past) % kAlignment / static_cast<int>(sizeof(Out));
}

// Scales an `in` that is aligned where `out` is, and nothing of any other.
template <bool kAccumulate, typename In, typename Out>
__device__ Body ScaleAligned(const In* in, int numel, Wider<In, Out> scale,
                             Out* out) {
  constexpr int kSize =
      16 / (sizeof(In) < sizeof(Out) ? sizeof(In) : sizeof(Out));
  const int head = HeadOf<kSize>(out);
  if (head > numel || !IsAligned<In, kSize>(in + head)) return {0, 0};
  const int vectors = (numel - head) / kSize;
  ScaleVectors<kAccumulate, In, kSize>(vectors, scale, out + head, [&](int i) {
    return LoadVector<In, kSize>(in + head + i * kSize);
  });
  return {head, head + vectors * kSize};
}

// Scales any other `in`: each vector is cut out of the two aligned ones that
// have it, of which none reaches beyond `in`.
template <bool kAccumulate, typename In, typename Out>
__device__ Body ScaleShifted(const In* in, int numel, Wider<In, Out> scale,
                             Out* out) {
  constexpr auto kBytes = static_cast<int>(sizeof(Words));
  constexpr auto kInBytes = static_cast<int>(sizeof(In));
  constexpr int kSize = kBytes / kInBytes;
  int head = HeadOf<kSize>(out);
  const auto skipped =
      static_cast<int>(reinterpret_cast<uintptr_t>(in + head) % kBytes);
  if (head * kInBytes < skipped) head += kSize;
  const int vectors = ((numel - head) * kInBytes + skipped) / kBytes - 1;
  if (head > numel || vectors <= 0) return {0, 0};
  const char* const aligned =
      reinterpret_cast<const char*>(in + head) - skipped;
  ScaleVectors<kAccumulate, In, kSize>(vectors, scale, out + head, [&](int i) {
    return LoadShifted<In>(aligned + i * kBytes, skipped);
  });
  return {head, head + vectors * kSize};
}

// Called by all threads of the block.
template <bool kAccumulate, typename In, typename Out>
__device__ void ScaleChunk(const In* in, int numel, double scale, Out* out) {
  const auto factor = static_cast<Wider<In, Out>>(scale);
  Body body = ScaleAligned<kAccumulate>(in, numel, factor, out);
  if (body.begin == body.end) {
    body = ScaleShifted<kAccumulate>(in, numel, factor, out);
  }
  const int rest = numel - (body.end - body.begin);
  for (int i = threadIdx.x; i < rest; i += kThreads) {
    const int at = i < body.begin ? i : i + (body.end - body.begin);
    out[at] =
        Scaled<kAccumulate>(in[at], kAccumulate ? out[at] : Out(), factor);
  }
}

template <bool kAccumulate, typename Out, int kItems>
__global__ void __launch_bounds__(kThreads)
    PackKernel(const __grid_constant__ PackTable<kItems> table, Out* out,
               double scale) {
  const uint32_t chunks = table.first_chunk[table.count];
  for (uint32_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const int item = ItemOf(table, chunk);
    const int64_t begin =
        static_cast<int64_t>(chunk - table.first_chunk[item]) * kChunk;
    const int64_t left = table.numel[item] - begin;
    const int numel = left < kChunk ? static_cast<int>(left) : kChunk;
    Out* const to = out + table.begin[item] + begin;
    const void* const source = table.source[item];
    if (source == nullptr) {
      const Out value = FromFloat<Out>(table.is_one[item] != 0 ? 1.0f : 0.0f);
      for (int i = threadIdx.x; i < numel; i += kThreads) to[i] = value;
      continue;
    }
    WithType(static_cast<Element>(table.element[item]), [&](auto type) {
      using In = decltype(type);
      ScaleChunk<kAccumulate>(static_cast<const In*>(source) + begin, numel,
                              scale, to);
    });
  }
}

struct Request {
  Element out_type;
  void* out;
  double scale;
  bool accumulate;
  unsigned max_blocks;
  cudaStream_t stream;
};

template <int kItems>
cudaError_t LaunchTable(const PackItem* items, int count,
                        const Request& request) {
  static_assert(sizeof(PackTable<kItems>) + 64 <= 32764);
  PackTable<kItems> table;
  table.count = count;
  uint32_t chunks = 0;
  for (int i = 0; i < count; ++i) {
    const PackItem& item = items[i];
    table.first_chunk[i] = chunks;
    table.source[i] = item.source;
    table.begin[i] = item.begin;
    table.numel[i] = item.numel;
    table.element[i] = static_cast<uint8_t>(item.element);
    table.is_one[i] = item.value != 0 ? 1 : 0;
    chunks += static_cast<uint32_t>((item.numel + kChunk - 1) / kChunk);
  }
  table.first_chunk[count] = chunks;
  const unsigned blocks = std::min(chunks, request.max_blocks);
  return WithType(request.out_type, [&](auto type) {
    using Out = decltype(type);
    return Launch(request.accumulate ? &PackKernel<true, Out, kItems>
                                     : &PackKernel<false, Out, kItems>,
                  blocks, kThreads, request.stream, table,
                  static_cast<Out*>(request.out), request.scale);
  });
}

}  // namespace

cudaError_t LaunchPack(const PackItem* items, int64_t count, Element out_type,
                       void* out, double scale, bool accumulate,
                       cudaStream_t stream) {
  unsigned max_blocks = 0;
  cudaError_t error = ResidentBlocks(kThreads, &max_blocks);
  const Request request = {out_type,   out,        scale,
                           accumulate, max_blocks, stream};
  for (int64_t i = 0; i < count && error == cudaSuccess; i += kMaxPackItems) {
    const auto size =
        static_cast<int>(std::min<int64_t>(count - i, kMaxPackItems));
    error = size <= kFewItems
                ? LaunchTable<kFewItems>(items + i, size, request)
                : LaunchTable<kMaxPackItems>(items + i, size, request);
  }
  return error;
}

}  // namespace fsdp::device_ops::cuda
