#include "comm/reduction/float_sum.h"

#include <algorithm>
#include <cstdint>

#include "absl/types/span.h"

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

// From `begin` on; returns where it ends. Only where the processor has AVX2.
// To go past the caches out + begin is aligned to a vector.
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
  // Such stores are not ordered before those that tell other threads of them.
  if constexpr (kPastCaches) _mm_sfence();
  return i;
}

// The first elements, up to where vectors are aligned.
int64_t ElementsBeforeVector(const float* out, int64_t count) {
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out) %
                                         uintptr_t{kVectorBytes});
  const int64_t bytes = (kVectorBytes - past) % kVectorBytes;
  return std::min(count, bytes / static_cast<int64_t>(sizeof(float)));
}
#endif

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

}  // namespace fsdp::comm
