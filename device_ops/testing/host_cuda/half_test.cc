#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "gtest/gtest.h"

namespace fsdp::device_ops::testing {
namespace {

float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

void ExpectRoundedAsByLibTorch(float value) {
  const __half half = __float2half_rn(value);
  const __nv_bfloat16 bfloat16 = __float2bfloat16_rn(value);
  if (std::isnan(value)) {
    EXPECT_TRUE(std::isnan(__half2float(half)));
    EXPECT_TRUE(std::isnan(__bfloat162float(bfloat16)));
    return;
  }
  ASSERT_EQ(half.bits, c10::Half(value).x) << value;
  ASSERT_EQ(bfloat16.bits, c10::BFloat16(value).x) << value;
}

TEST(HalfTest, EveryOneIsTheNumberThatLibTorchTakesItFor) {
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float as_half = c10::Half(half, c10::Half::from_bits());
    const float as_bfloat16 = c10::BFloat16(half, c10::BFloat16::from_bits());
    if (std::isnan(as_half)) {
      EXPECT_TRUE(std::isnan(__half2float({half})));
    } else {
      ASSERT_EQ(__half2float({half}), as_half) << bits;
      ASSERT_EQ(std::signbit(__half2float({half})), std::signbit(as_half));
    }
    if (std::isnan(as_bfloat16)) {
      EXPECT_TRUE(std::isnan(__bfloat162float({half})));
    } else {
      ASSERT_EQ(__bfloat162float({half}), as_bfloat16) << bits;
    }
  }
}

// Tries every half, the middle between two, and numbers beside it.
TEST(HalfTest, RoundsToTheNearestOnesAndTiesToEven) {
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float here = c10::Half(half, c10::Half::from_bits());
    const float next =
        c10::Half(static_cast<uint16_t>(half + 1), c10::Half::from_bits());
    const float middle = (here + next) / 2;
    for (float value : {here, middle, std::nextafterf(middle, here),
                        std::nextafterf(middle, next)}) {
      ExpectRoundedAsByLibTorch(value);
    }
    for (uint32_t low : {0x0, 0x1, 0x7fff, 0x8000, 0x8001, 0xffff}) {
      ExpectRoundedAsByLibTorch(FloatOf(bits << 16 | low));
    }
  }
}

}  // namespace
}  // namespace fsdp::device_ops::testing
