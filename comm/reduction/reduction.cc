#include "comm/reduction/reduction.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "base/check.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fsdp::comm {
namespace {

using Inputs = absl::Span<const float* const>;

void SumOneByOne(Inputs inputs, int64_t begin, int64_t count, float scale,
                 bool accumulate, float* out) {
  for (int64_t i = begin; i < count; ++i) {
    float sum = inputs[0][i];
    for (const float* input : inputs.subspan(1)) sum += input[i];
    const float scaled = sum * scale;
    out[i] = accumulate ? out[i] + scaled : scaled;
  }
}

#if defined(__x86_64__)
// Elements per turn: enough independent sums to keep the loads busy.
constexpr int64_t kLanes = 8;
constexpr int kRegisters = 4;
constexpr int64_t kTurn = kLanes * kRegisters;
constexpr int64_t kVectorBytes = kLanes * sizeof(float);

// Sums from `begin` on and returns where it ends. Requires AVX2 and, if
// kPastCaches, that out + begin is aligned to a vector.
template <bool kPastCaches>
__attribute__((target("avx2"))) int64_t SumByAvx2(Inputs inputs, int64_t begin,
                                                  int64_t count, float scale,
                                                  bool accumulate, float* out) {
  const __m256 factor = _mm256_set1_ps(scale);
  int64_t i = begin;
  for (; i + kTurn <= count; i += kTurn) {
    __m256 sums[kRegisters];
    for (int r = 0; r < kRegisters; ++r) {
      sums[r] = _mm256_loadu_ps(inputs[0] + i + r * kLanes);
    }
    for (size_t k = 1; k < inputs.size(); ++k) {
      const float* input = inputs[k] + i;
      for (int r = 0; r < kRegisters; ++r) {
        sums[r] = _mm256_add_ps(sums[r], _mm256_loadu_ps(input + r * kLanes));
      }
    }
    for (int r = 0; r < kRegisters; ++r) {
      float* target = out + i + r * kLanes;
      __m256 scaled = _mm256_mul_ps(sums[r], factor);
      if (accumulate) {
        scaled = _mm256_add_ps(_mm256_loadu_ps(target), scaled);
      }
      if constexpr (kPastCaches) {
        _mm256_stream_ps(target, scaled);
      } else {
        _mm256_storeu_ps(target, scaled);
      }
    }
  }
  // The stores must precede those that tell other threads of them.
  if constexpr (kPastCaches) _mm_sfence();
  return i;
}

// Returns the number of elements before the first aligned vector.
int64_t ElementsBeforeVector(const float* out, int64_t count) {
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out) %
                                         uintptr_t{kVectorBytes});
  const int64_t bytes = (kVectorBytes - past) % kVectorBytes;
  return std::min(count, bytes / static_cast<int64_t>(sizeof(float)));
}
#endif

// The accumulators of one block stay in the first-level cache while the inputs
// stream past.
constexpr int64_t kBlockElements = 2048;

template <typename T>
constexpr bool kIsHalf =
    std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;

template <typename T>
using Accumulator = std::conditional_t<kIsHalf<T>, float, T>;

struct Sum {
  template <typename A>
  static A Apply(A a, A b) {
    if constexpr (std::is_integral_v<A>) {
      using Unsigned = std::make_unsigned_t<A>;  // wraps without overflow
      return static_cast<A>(static_cast<Unsigned>(a) +
                            static_cast<Unsigned>(b));
    } else {
      return a + b;
    }
  }
};

// A comparison with a NaN is false: `b != b` lets one in, and one in `a` stays.
struct Min {
  template <typename A>
  static A Apply(A a, A b) {
    return (b < a || b != b) ? b : a;
  }
};

struct Max {
  template <typename A>
  static A Apply(A a, A b) {
    return (b > a || b != b) ? b : a;
  }
};

template <typename T, typename Op>
void ReduceBlocks(absl::Span<const void* const> inputs, int64_t count,
                  void* out) {
  using A = Accumulator<T>;
  A accumulators[kBlockElements];
  for (int64_t begin = 0; begin < count; begin += kBlockElements) {
    const int64_t size = std::min(kBlockElements, count - begin);
    const T* first = static_cast<const T*>(inputs[0]) + begin;
    for (int64_t i = 0; i < size; ++i) {
      accumulators[i] = static_cast<A>(first[i]);
    }
    for (const void* input : inputs.subspan(1)) {
      const T* next = static_cast<const T*>(input) + begin;
      for (int64_t i = 0; i < size; ++i) {
        accumulators[i] =
            Op::template Apply<A>(accumulators[i], static_cast<A>(next[i]));
      }
    }
    T* result = static_cast<T*>(out) + begin;
    for (int64_t i = 0; i < size; ++i) {
      result[i] = static_cast<T>(accumulators[i]);
    }
  }
}

template <typename T, typename Out>
void ScaleBlock(const T* sums, int64_t size, double scale, bool accumulate,
                Out* out) {
  constexpr bool kWide =
      std::is_same_v<T, double> || std::is_same_v<Out, double>;
  using A = std::conditional_t<kWide, double, float>;
  const A factor = static_cast<A>(scale);
  if (accumulate) {
    for (int64_t i = 0; i < size; ++i) {
      out[i] = static_cast<Out>(static_cast<A>(out[i]) +
                                factor * static_cast<A>(sums[i]));
    }
  } else {
    for (int64_t i = 0; i < size; ++i) {
      out[i] = static_cast<Out>(factor * static_cast<A>(sums[i]));
    }
  }
}

template <typename T, typename Out>
void SumScaledTyped(absl::Span<const void* const> inputs, int64_t count,
                    double scale, bool accumulate, Out* out) {
  T sums[kBlockElements];
  std::vector<const void*> block(inputs.size());
  for (int64_t begin = 0; begin < count; begin += kBlockElements) {
    const int64_t size = std::min(kBlockElements, count - begin);
    for (size_t i = 0; i < inputs.size(); ++i) {
      block[i] = static_cast<const T*>(inputs[i]) + begin;
    }
    ReduceBlocks<T, Sum>(block, size, sums);
    ScaleBlock(sums, size, scale, accumulate, out + begin);
  }
}

// Calls fn(T()) with the C++ type of a floating-point dtype.
template <typename Fn>
void DispatchFloating(at::ScalarType dtype, Fn fn) {
  switch (dtype) {
    // The cases differ by type, which the check does not see.
    case at::ScalarType::Float:  // NOLINT(bugprone-branch-clone)
      return fn(float());
    case at::ScalarType::Double:
      return fn(double());
    case at::ScalarType::Half:
      return fn(c10::Half());
    case at::ScalarType::BFloat16:
      return fn(c10::BFloat16());
    default:
      FSDP_CHECK(!"Communicator refuses every other dtype");
  }
}

absl::InlinedVector<const float*, 16> AsFloats(
    absl::Span<const void* const> inputs) {
  absl::InlinedVector<const float*, 16> floats;
  for (const void* input : inputs) {
    floats.push_back(static_cast<const float*>(input));
  }
  return floats;
}

template <typename T>
void ReduceTyped(ReduceOp op, absl::Span<const void* const> inputs,
                 int64_t count, void* out) {
  switch (op) {
    case ReduceOp::kSum:
      return ReduceBlocks<T, Sum>(inputs, count, out);
    case ReduceOp::kMin:
      return ReduceBlocks<T, Min>(inputs, count, out);
    case ReduceOp::kMax:
      return ReduceBlocks<T, Max>(inputs, count, out);
  }
}

}  // namespace

void SumFloats(Inputs inputs, int64_t count, float scale, bool accumulate,
               Stores stores, float* out) {
  int64_t done = 0;
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2 && stores == Stores::kPastCaches) {
    done = ElementsBeforeVector(out, count);
    SumOneByOne(inputs, 0, done, scale, accumulate, out);
    done = SumByAvx2<true>(inputs, done, count, scale, accumulate, out);
  } else if (has_avx2) {
    done = SumByAvx2<false>(inputs, 0, count, scale, accumulate, out);
  }
#else
  (void)stores;
#endif
  SumOneByOne(inputs, done, count, scale, accumulate, out);
}

void Reduce(at::ScalarType dtype, ReduceOp op,
            absl::Span<const void* const> inputs, int64_t count, void* out) {
  FSDP_CHECK(!inputs.empty());
  if (dtype == at::ScalarType::Float && op == ReduceOp::kSum) {
    return SumFloats(AsFloats(inputs), count, 1, false, Stores::kCached,
                     static_cast<float*>(out));
  }
  switch (dtype) {
    case at::ScalarType::Int:
      return ReduceTyped<int32_t>(op, inputs, count, out);
    case at::ScalarType::Long:
      return ReduceTyped<int64_t>(op, inputs, count, out);
    case at::ScalarType::Byte:
      return ReduceTyped<uint8_t>(op, inputs, count, out);
    default:
      return DispatchFloating(dtype, [&](auto value) {
        ReduceTyped<decltype(value)>(op, inputs, count, out);
      });
  }
}

void SumScaled(at::ScalarType dtype, absl::Span<const void* const> inputs,
               int64_t count, double scale, bool accumulate,
               at::ScalarType out_dtype, Stores stores, void* out) {
  FSDP_CHECK(!inputs.empty());
  if (dtype == at::ScalarType::Float && out_dtype == at::ScalarType::Float) {
    return SumFloats(AsFloats(inputs), count, static_cast<float>(scale),
                     accumulate, stores, static_cast<float*>(out));
  }
  DispatchFloating(dtype, [&](auto in_value) {
    DispatchFloating(out_dtype, [&](auto out_value) {
      using Out = decltype(out_value);
      SumScaledTyped<decltype(in_value)>(inputs, count, scale, accumulate,
                                         static_cast<Out*>(out));
    });
  });
}

}  // namespace fsdp::comm
