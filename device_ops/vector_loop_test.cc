#include "device_ops/vector_loop.h"

#include <cmath>

#include "gtest/gtest.h"

namespace fsdp::device_ops {
namespace {

bool SameNumber(float a, float b) {
  return BitsOf(a) == BitsOf(b) || (std::isnan(a) && std::isnan(b));
}

TEST(ConversionTest, EveryHalfBecomesTheFloatOfC10) {
  for (uint32_t bits = 0; bits < 65'536; ++bits) {
    const auto x = static_cast<uint16_t>(bits);
    const c10::Half half(x, c10::Half::from_bits());
    ASSERT_TRUE(SameNumber(ToFloat(half), static_cast<float>(half))) << bits;
    const c10::BFloat16 brain(x, c10::BFloat16::from_bits());
    ASSERT_TRUE(SameNumber(ToFloat(brain), static_cast<float>(brain))) << bits;
  }
}

// On ARM c10 converts by an instruction that keeps the payload of a NaN.
template <typename Half>
bool HasBitsOfC10(Half actual, Half expected) {
#if defined(__aarch64__)
  return SameNumber(actual, expected);
#else
  return actual.x == expected.x;
#endif
}

void ExpectConversionsOfC10(float value) {
  ASSERT_TRUE(HasBitsOfC10(FromFloat<c10::Half>(value), c10::Half(value)))
      << BitsOf(value);
  ASSERT_TRUE(
      HasBitsOfC10(FromFloat<c10::BFloat16>(value), c10::BFloat16(value)))
      << BitsOf(value);
}

TEST(ConversionTest, FloatsAreRoundedAsByC10) {
  // The step is prime to all of their fields.
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 1021) {
    ExpectConversionsOfC10(FloatOf(static_cast<uint32_t>(bits)));
  }
}

TEST(ConversionTest, TiesAndTheirNeighboursAreRoundedAsByC10) {
  for (uint32_t bits = 0; bits < 65'536; ++bits) {
    const auto x = static_cast<uint16_t>(bits);
    const uint32_t half =
        BitsOf(static_cast<float>(c10::Half(x, c10::Half::from_bits())));
    for (uint32_t tie : {half + 0x1000, (bits << 16) + 0x8000}) {
      for (uint32_t near : {tie - 1, tie, tie + 1}) {
        ExpectConversionsOfC10(FloatOf(near));
      }
    }
  }
}

}  // namespace
}  // namespace fsdp::device_ops
