#include <cuda_runtime.h>

#include <initializer_list>
#include <limits>

#include "device_ops/cuda/device.cuh"
#include "device_ops/cuda/kernels.h"

namespace fsdp::device_ops::cuda {
namespace {

constexpr int kThreads = 256;
// The threads of a row of logits.
constexpr int kRowThreads = 512;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffff;
constexpr uint32_t kNan = 0x7fc00000;

// The elements that one load brings at most.
template <typename T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

// The type in which numbers of type T are computed with.
template <typename T>
using Exact = Wider<T, float>;

__device__ float Exp(float value) { return expf(value); }
__device__ double Exp(double value) { return exp(value); }
__device__ float Log(float value) { return logf(value); }
__device__ double Log(double value) { return log(value); }
// Returns `a` if `b` is NaN.
__device__ float Max(float a, float b) { return fmaxf(a, b); }
__device__ double Max(double a, double b) { return fmax(a, b); }

// Loads `count` neighbours into the first elements, by one instruction if they
// fill the vector and are aligned.
template <int kSize, typename T>
__device__ Vector<T, kSize> LoadSome(const T* from, int count, bool aligned) {
  if (aligned && count == kSize) return LoadVector<T, kSize>(from);
  Vector<T, kSize> loaded{};
#pragma unroll
  for (int k = 0; k < kSize; ++k) {
    if (k < count) loaded.elements[k] = from[k];
  }
  return loaded;
}

template <int kSize, typename T>
__device__ void StoreSome(const Vector<T, kSize>& vector, int count,
                          bool aligned, T* to) {
  if (aligned && count == kSize) return StoreVector<T, kSize>(vector, to);
#pragma unroll
  for (int k = 0; k < kSize; ++k) {
    if (k < count) to[k] = vector.elements[k];
  }
}

// Returns the index of this thread in the grid.
__device__ int64_t Index() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

unsigned BlocksFor(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

// Takes a thread for `kSize` neighbours and their partners. Heads of a token
// come one after the other, so that they share what is read of the tables.
template <int kSize, typename T>
__global__ void __launch_bounds__(kThreads)
    RotateKernel(RotatedHeads heads, int64_t vectors, Divider by_vectors,
                 Divider by_heads, Divider by_tokens) {
  const int64_t row = by_vectors.Quotient(Index());
  const int64_t place = by_heads.Quotient(row);
  const int64_t batch = by_tokens.Quotient(place);
  if (batch >= heads.batch) return;
  const int64_t head = row - place * heads.heads;
  const int64_t token = place - batch * heads.tokens;
  const int64_t first = (Index() - row * vectors) * kSize;
  const auto load = [](const void* from, int64_t at) {
    return LoadVector<T, kSize>(static_cast<const T*>(from) + at);
  };
  const auto place_in = [&](const int64_t* strides) {
    return batch * strides[0] + head * strides[1] + token * strides[2] + first;
  };
  const int64_t from = place_in(heads.x_strides);
  const int64_t table = token * 2 * heads.half + first;
  const Vector<T, kSize> x[] = {load(heads.x, from),
                                load(heads.x, from + heads.half)};
  const Vector<T, kSize> cos[] = {load(heads.cos, table),
                                  load(heads.cos, table + heads.half)};
  const Vector<T, kSize> sin[] = {load(heads.sin, table),
                                  load(heads.sin, table + heads.half)};
  Vector<T, kSize> low, high;
#pragma unroll
  for (int k = 0; k < kSize; ++k) {
    const auto exact = [k](const Vector<T, kSize>& vector) {
      return Widen<Exact<T>>(vector.elements[k]);
    };
    // The transposed matrix has the sines in each other's place and negated.
    const Exact<T> low_sin = heads.inverse ? -exact(sin[1]) : exact(sin[0]);
    const Exact<T> high_sin = heads.inverse ? -exact(sin[0]) : exact(sin[1]);
    low.elements[k] = Narrow<T>(Add(Multiply(exact(x[0]), exact(cos[0])),
                                    -Multiply(exact(x[1]), low_sin)));
    high.elements[k] = Narrow<T>(Add(Multiply(exact(x[1]), exact(cos[1])),
                                     Multiply(exact(x[0]), high_sin)));
  }
  T* const to = static_cast<T*>(heads.out) + place_in(heads.out_strides);
  StoreVector<T, kSize>(low, to);
  StoreVector<T, kSize>(high, to + heads.half);
}

template <int kSize, typename T>
cudaError_t RotateTyped(const RotatedHeads& heads, cudaStream_t stream) {
  const int64_t vectors = heads.half / kSize;
  return Launch(&RotateKernel<kSize, T>,
                BlocksFor(heads.batch * heads.tokens * heads.heads * vectors),
                kThreads, stream, heads, vectors, Divider(vectors),
                Divider(heads.heads), Divider(heads.tokens));
}

// Takes a thread for a vector, of which the last may have fewer elements.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    SwiGluKernel(int64_t numel, bool aligned, const T* gate, const T* up,
                 T* out) {
  constexpr int kSize = kVector<T>;
  const int64_t first = Index() * kSize;
  if (first >= numel) return;
  const int count = static_cast<int>(min(numel - first, int64_t{kSize}));
  const auto gates = LoadSome<kSize>(gate + first, count, aligned);
  const auto ups = LoadSome<kSize>(up + first, count, aligned);
  Vector<T, kSize> result;
#pragma unroll
  for (int k = 0; k < kSize; ++k) {
    const auto x = Widen<Exact<T>>(gates.elements[k]);
    result.elements[k] =
        Narrow<T>(x / (1 + Exp(-x)) * Widen<Exact<T>>(ups.elements[k]));
  }
  StoreSome<kSize>(result, count, aligned, out + first);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    SwiGluBackwardKernel(int64_t numel, bool aligned, const T* gradient,
                         const T* gate, const T* up, T* of_gate, T* of_up) {
  constexpr int kSize = kVector<T>;
  const int64_t first = Index() * kSize;
  if (first >= numel) return;
  const int count = static_cast<int>(min(numel - first, int64_t{kSize}));
  const auto gradients = LoadSome<kSize>(gradient + first, count, aligned);
  const auto gates = LoadSome<kSize>(gate + first, count, aligned);
  const auto ups = LoadSome<kSize>(up + first, count, aligned);
  Vector<T, kSize> of_gates, of_ups;
#pragma unroll
  for (int k = 0; k < kSize; ++k) {
    const auto x = Widen<Exact<T>>(gates.elements[k]);
    const auto given = Widen<Exact<T>>(gradients.elements[k]);
    const Exact<T> sigmoid = 1 / (1 + Exp(-x));
    of_gates.elements[k] = Narrow<T>(given * Widen<Exact<T>>(ups.elements[k]) *
                                     sigmoid * (1 + x * (1 - sigmoid)));
    of_ups.elements[k] = Narrow<T>(given * x * sigmoid);
  }
  StoreSome<kSize>(of_gates, count, aligned, of_gate + first);
  StoreSome<kSize>(of_ups, count, aligned, of_up + first);
}

// Called by all threads of a row: calls fn(first element, elements) for its
// vectors, which are aligned if they are full.
template <typename T, typename Fn>
__device__ void ForEachVector(const T* row, int64_t size, const Fn& fn) {
  constexpr int kSize = kVector<T>;
  const auto past = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16);
  const int64_t head =
      min(int64_t{(16 - past) % 16 / static_cast<int>(sizeof(T))}, size);
  if (threadIdx.x == 0 && head > 0) fn(int64_t{0}, static_cast<int>(head));
  for (int64_t first = head + int64_t{kSize} * threadIdx.x; first < size;
       first += int64_t{kSize} * kRowThreads) {
    fn(first, static_cast<int>(min(size - first, int64_t{kSize})));
  }
}

// The largest logit of some, and the sum of exp(logit - largest).
template <typename Computed>
struct Softmax {
  Computed largest;
  Computed sum;
};

// Has the same bits whichever of the two comes first.
template <typename Computed>
__device__ Softmax<Computed> Merged(const Softmax<Computed>& a,
                                    const Softmax<Computed>& b) {
  const Computed largest = Max(a.largest, b.largest);
  return {largest, Add(Multiply(a.sum, Exp(a.largest - largest)),
                       Multiply(b.sum, Exp(b.largest - largest)))};
}

// Merges those of lanes whose numbers differ in bits below `lanes`.
template <typename Computed>
__device__ Softmax<Computed> MergedOverLanes(Softmax<Computed> mine,
                                             int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    Softmax<Computed> other;
    other.largest = __shfl_xor_sync(kAllLanes, mine.largest, offset);
    other.sum = __shfl_xor_sync(kAllLanes, mine.sum, offset);
    mine = Merged(mine, other);
  }
  return mine;
}

// Called by all threads of the block, which all get the result.
template <typename T>
__device__ Softmax<Exact<T>> SoftmaxOf(const T* row, int64_t classes) {
  constexpr int kWarps = kRowThreads / kWarp;
  // It is no logit, and finite: the difference of two infinite ones is NaN.
  Softmax<Exact<T>> mine = {std::numeric_limits<Exact<T>>::lowest(), 0};
  ForEachVector(row, classes, [&](int64_t first, int count) {
    const auto x = LoadSome<kVector<T>>(row + first, count, true);
    Exact<T> largest = mine.largest;
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) {
      if (k < count) largest = Max(largest, Widen<Exact<T>>(x.elements[k]));
    }
    mine.sum *= Exp(mine.largest - largest);
    mine.largest = largest;
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) {
      if (k < count) mine.sum += Exp(Widen<Exact<T>>(x.elements[k]) - largest);
    }
  });
  __shared__ Softmax<Exact<T>> of_warps[kWarps];
  mine = MergedOverLanes(mine, kWarp);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  return MergedOverLanes(of_warps[threadIdx.x % kWarps], kWarps);
}

// Takes a block for a row, which it reads once for the sum of exponentials and
// once more for the gradient.
template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    CrossEntropyKernel(int64_t classes, T* logits, const int64_t* targets,
                       int64_t ignored, bool gradient, Exact<T>* losses) {
  constexpr int kSize = kVector<T>;
  const int64_t target = targets[blockIdx.x];
  T* const row = logits + blockIdx.x * classes;
  if (target == ignored) {
    if (threadIdx.x == 0) losses[blockIdx.x] = 0;
    if (!gradient) return;
    const Vector<T, kSize> zeros{};
    ForEachVector(row, classes, [&](int64_t first, int count) {
      StoreSome<kSize>(zeros, count, true, row + first);
    });
    return;
  }
  const bool is_class = 0 <= target && target < classes;
  // Read before it is overwritten, behind the barrier of the softmax.
  const Exact<T> chosen =
      is_class ? Widen<Exact<T>>(row[target]) : __uint_as_float(kNan);
  const Softmax<Exact<T>> softmax = SoftmaxOf(row, classes);
  if (threadIdx.x == 0) {
    losses[blockIdx.x] = Log(softmax.sum) - (chosen - softmax.largest);
  }
  if (!gradient) return;
  const Exact<T> factor = 1 / softmax.sum;
  ForEachVector(row, classes, [&](int64_t first, int count) {
    auto x = LoadSome<kSize>(row + first, count, true);
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      x.elements[k] = Narrow<T>(
          Exp(Widen<Exact<T>>(x.elements[k]) - softmax.largest) * factor);
    }
    StoreSome<kSize>(x, count, true, row + first);
  });
  __syncthreads();
  if (threadIdx.x == 0 && is_class) {
    row[target] = Narrow<T>(Exp(chosen - softmax.largest) * factor - 1);
  }
}

// Returns whether all vectors begin at an address for one load.
template <typename T>
bool AreAligned(std::initializer_list<const void*> arrays) {
  for (const void* array : arrays) {
    if (!IsAligned<T, kVector<T>>(static_cast<const T*>(array))) return false;
  }
  return true;
}

template <typename T>
bool IsVectorised(const RotatedHeads& heads) {
  bool is = heads.half % kVector<T> == 0 &&
            AreAligned<T>({heads.x, heads.cos, heads.sin, heads.out});
  for (int i = 0; i < 3; ++i) {
    is = is && heads.x_strides[i] % kVector<T> == 0 &&
         heads.out_strides[i] % kVector<T> == 0;
  }
  return is;
}

}  // namespace

cudaError_t LaunchRotate(const RotatedHeads& heads, Element type,
                         cudaStream_t stream) {
  if (heads.batch * heads.heads * heads.tokens == 0) return cudaSuccess;
  return WithType(type, [&](auto zero) {
    using T = decltype(zero);
    return IsVectorised<T>(heads) ? RotateTyped<kVector<T>, T>(heads, stream)
                                  : RotateTyped<1, T>(heads, stream);
  });
}

cudaError_t LaunchSwiGlu(int64_t numel, Element type, const void* gate,
                         const void* up, void* out, cudaStream_t stream) {
  if (numel == 0) return cudaSuccess;
  return WithType(type, [&](auto zero) {
    using T = decltype(zero);
    return Launch(&SwiGluKernel<T>,
                  BlocksFor((numel + kVector<T> - 1) / kVector<T>), kThreads,
                  stream, numel, AreAligned<T>({gate, up, out}),
                  static_cast<const T*>(gate), static_cast<const T*>(up),
                  static_cast<T*>(out));
  });
}

cudaError_t LaunchSwiGluBackward(int64_t numel, Element type,
                                 const void* gradient, const void* gate,
                                 const void* up, void* of_gate, void* of_up,
                                 cudaStream_t stream) {
  if (numel == 0) return cudaSuccess;
  return WithType(type, [&](auto zero) {
    using T = decltype(zero);
    return Launch(&SwiGluBackwardKernel<T>,
                  BlocksFor((numel + kVector<T> - 1) / kVector<T>), kThreads,
                  stream, numel,
                  AreAligned<T>({gradient, gate, up, of_gate, of_up}),
                  static_cast<const T*>(gradient), static_cast<const T*>(gate),
                  static_cast<const T*>(up), static_cast<T*>(of_gate),
                  static_cast<T*>(of_up));
  });
}

cudaError_t LaunchCrossEntropy(int64_t rows, int64_t classes, Element type,
                               void* logits, const int64_t* targets,
                               int64_t ignored, bool gradient, void* losses,
                               cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  return WithType(type, [&](auto zero) {
    using T = decltype(zero);
    return Launch(&CrossEntropyKernel<T>, static_cast<unsigned>(rows),
                  kRowThreads, stream, classes, static_cast<T*>(logits),
                  targets, ignored, gradient, static_cast<Exact<T>*>(losses));
  });
}

}  // namespace fsdp::device_ops::cuda
