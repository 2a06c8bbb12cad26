// Parts that the host's loops over floating-point numbers share.
#ifndef DEVICE_OPS_VECTOR_LOOP_H_
#define DEVICE_OPS_VECTOR_LOOP_H_

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace fsdp::device_ops {

inline uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Conversions with the results of c10's (but for the bits of a NaN: c10 quiets
// a signalling half, and ARM's instruction keeps others), without branches,
// which would keep a compiler from vectorising.
inline float ToFloat(float value) { return value; }
inline float ToFloat(double value) { return static_cast<float>(value); }
inline float ToFloat(c10::BFloat16 value) {
  return FloatOf(static_cast<uint32_t>(value.x) << 16);
}
inline float ToFloat(c10::Half value) {
  constexpr uint32_t kRebias = (127 - 15) << 23;
  const uint32_t sign = static_cast<uint32_t>(value.x & 0x8000) << 16;
  const uint32_t rest = static_cast<uint32_t>(value.x & 0x7fff) << 13;
  const uint32_t normal = rest + kRebias;
  const uint32_t special = normal + kRebias;  // infinity and NaN
  // A subnormal number becomes the fraction of 2^-14, which is then subtracted.
  const float least = FloatOf(113 << 23);
  const uint32_t subnormal = BitsOf(FloatOf(rest + (113 << 23)) - least);
  const uint32_t finite = rest < (1 << 23) ? subnormal : normal;
  return FloatOf((rest >= (0x7c00 << 13) ? special : finite) | sign);
}

template <typename To>
inline To FromFloat(float value) {
  return static_cast<To>(value);
}
template <>
inline c10::BFloat16 FromFloat(float value) {
  const uint32_t bits = BitsOf(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return c10::BFloat16(static_cast<uint16_t>(is_nan ? 0x7fc0 : rounded),
                       c10::BFloat16::from_bits());
}
template <>
inline c10::Half FromFloat(float value) {
  const uint32_t bits = BitsOf(value);
  const uint32_t sign = bits & 0x80000000;
  const uint32_t rest = bits ^ sign;
  // The sum's last bits are the rounded bits of a subnormal number.
  constexpr uint32_t kRound = ((127 - 15) + (23 - 10) + 1) << 23;
  const uint32_t subnormal = BitsOf(FloatOf(rest) + FloatOf(kRound)) - kRound;
  const uint32_t normal =
      (rest + 0xfff + ((rest >> 13) & 1) - ((127 - 15) << 23)) >> 13;
  const uint32_t special = rest > 0x7f800000 ? 0x7e00 : 0x7c00;
  const uint32_t finite = rest < (113 << 23) ? subnormal : normal;
  const uint32_t half = rest >= ((127 + 16) << 23) ? special : finite;
  return c10::Half(static_cast<uint16_t>(half | (sign >> 16)),
                   c10::Half::from_bits());
}

// The type in which two numbers are multiplied or added: the wider of theirs,
// at least float.
template <typename A, typename B>
using Wider =
    std::conditional_t<std::is_same_v<A, double> || std::is_same_v<B, double>,
                       double, float>;

template <typename Computed, typename From>
inline Computed Widen(From value) {
  if constexpr (std::is_same_v<From, double>) {
    return static_cast<Computed>(value);
  } else {
    return static_cast<Computed>(ToFloat(value));
  }
}

template <typename To, typename Computed>
inline To Narrow(Computed value) {
  if constexpr (std::is_same_v<To, double>) {
    return static_cast<double>(value);
  } else if constexpr (std::is_same_v<To, c10::Half> &&
                       std::is_same_v<Computed, double>) {
    // On ARM c10 rounds once, elsewhere by way of a float.
    return static_cast<c10::Half>(value);
  } else {
    return FromFloat<To>(static_cast<float>(value));
  }
}

#if defined(__x86_64__)
template <typename Loop>
__attribute__((target("avx2"))) void RunByAvx2(Loop loop) {
  loop();
}
#endif

// Runs `loop`, a lambda with FSDP_VECTOR_LOOP after its (), compiled for the
// widest vectors of this processor. It has no fused operations, so that the
// bits are the same everywhere. Captures are copied, so that no store of the
// loop can change them.
template <typename Loop>
void RunVectorised(Loop loop) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) return RunByAvx2(loop);
#endif
  loop();
}

#define FSDP_VECTOR_LOOP __attribute__((always_inline))

// Sets out[i] = scale * in[i], or adds that to out[i]; the factor is first
// rounded to the type of the computation.
template <bool kAccumulate, typename In, typename Out>
void ScaleLoop(const In* in, int64_t numel, double scale, Out* out) {
  using Computed = Wider<In, Out>;
  const auto factor = static_cast<Computed>(scale);
  RunVectorised([=]() FSDP_VECTOR_LOOP {
    for (int64_t i = 0; i < numel; ++i) {
      Computed result = factor * Widen<Computed>(in[i]);
      if constexpr (kAccumulate) result = Widen<Computed>(out[i]) + result;
      out[i] = Narrow<Out>(result);
    }
  });
}

}  // namespace fsdp::device_ops

#endif  // DEVICE_OPS_VECTOR_LOOP_H_
