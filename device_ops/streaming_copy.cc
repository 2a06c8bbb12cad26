#include "device_ops/streaming_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace fsdp::device_ops {

#if defined(__x86_64__)

void StreamingCopy(void* to, const void* from, int64_t bytes) {
  constexpr int64_t kLine = 64;
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
  // Only whole lines are written without being read.
  const auto past_line = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out) %
                                              static_cast<uintptr_t>(kLine));
  const int64_t head = std::min(bytes, (kLine - past_line) % kLine);
  if (head > 0) std::memcpy(out, in, head);
  int64_t i = head;
  for (; i + kLine <= bytes; i += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(in + i);
    auto* target = reinterpret_cast<__m128i*>(out + i);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  if (i < bytes) std::memcpy(out + i, in + i, bytes - i);
  // These stores are not ordered with those of other threads' protocols.
  _mm_sfence();
}

#else

void StreamingCopy(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

#endif

}  // namespace fsdp::device_ops
