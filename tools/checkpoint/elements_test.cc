#include "tools/checkpoint/elements.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint::tool {
namespace {

using ::testing::ElementsAre;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <typename T>
std::string BytesOf(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()),
                     values.size() * sizeof(T));
}

TEST(ElementsTest, TableOfF16) {
  struct Case {
    double value;
    uint16_t bits;
  };
  for (const Case& c : std::vector<Case>{
           {0, 0x0000},
           {-0.0, 0x8000},
           {1, 0x3c00},
           {-2, 0xc000},
           {0.1, 0x2e66},
           {1.0 / 3, 0x3555},
           {65504, 0x7bff},         // the largest
           {65519.99, 0x7bff},      // below half to the next
           {65520, 0x7c00},         // half: to even, which is infinity
           {-1e300, 0xfc00},        //
           {kInfinity, 0x7c00},     //
           {-kInfinity, 0xfc00},    //
           {0x1p-14, 0x0400},       // the smallest normal one
           {0x1p-24, 0x0001},       // the smallest of all
           {0x1.8p-24, 0x0002},     // between 1 and 2: to even
           {0x1p-25, 0x0000},       // half of the smallest: to even
           {0x1.0001p-25, 0x0001},  //
           {0x1p-26, 0x0000},       //
           {5e-324, 0x0000},        // a double that is subnormal itself
           {0x1.ff8p-15, 0x03ff},   // the largest subnormal one: 1023 * 2^-24
           {0x1.ffcp-15, 0x0400},   // its tie carries into the exponent
           {1 + 0x1p-11, 0x3c00},   // a tie, down to even
           {1 + 0x3p-11, 0x3c02},   // a tie, up to even
           {1 + 0x1.0001p-11, 0x3c01},
           {2048 + 2047, 0x6c00}}) {  // 4095 rounds to 4096
    EXPECT_EQ(ToF16(c.value), c.bits) << c.value;
  }
  EXPECT_EQ(ToF16(kNan), 0x7e00);
  EXPECT_EQ(ToF16(std::copysign(kNan, -1)), 0xfe00);
}

TEST(ElementsTest, TableOfBF16) {
  struct Case {
    double value;
    uint16_t bits;
  };
  for (const Case& c :
       std::vector<Case>{{0, 0x0000},
                         {-0.0, 0x8000},
                         {1, 0x3f80},
                         {0.1, 0x3dcd},
                         {3.14159265, 0x4049},
                         {1 + 0x1p-8, 0x3f80},      // a tie, down to even
                         {1 + 0x3p-8, 0x3f82},      // a tie, up to even
                         {0x1.fep127, 0x7f7f},      // the largest
                         {0x1.fefffep127, 0x7f7f},  //
                         {0x1.ffp127, 0x7f80},      // half: infinity
                         {-3e39, 0xff80},           //
                         {kInfinity, 0x7f80},       //
                         {0x1p-126, 0x0080},        // the smallest normal one
                         {0x1p-133, 0x0001},        // the smallest of all
                         {0x1p-134, 0x0000},        // a tie
                         {0x1.8p-133, 0x0002},      // a tie
                         {0x1.fep-127, 0x0080},     // carries into the exponent
                         {1 + 0x1p-8 + 0x1p-40, 0x3f81}}) {  // rounded once
    EXPECT_EQ(ToBF16(c.value), c.bits) << c.value;
  }
  EXPECT_EQ(ToBF16(kNan), 0x7fc0);
  EXPECT_EQ(ToBF16(std::copysign(kNan, -1)), 0xffc0);
}

TEST(ElementsTest, All16BitFloatsSurviveARoundTrip) {
  for (uint32_t i = 0; i <= 0xffff; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    if (std::isnan(FromF16(bits))) {
      EXPECT_TRUE(std::isnan(FromF16(ToF16(FromF16(bits)))));
    } else {
      ASSERT_EQ(ToF16(FromF16(bits)), bits);
    }
    if (!std::isnan(FromBF16(bits))) {
      ASSERT_EQ(ToBF16(FromBF16(bits)), bits);
    }
  }
}

// Neighbors in between which a value lies, and which of them is nearer, are
// found by trying.
TEST(ElementsTest, RoundsToTheNearest) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 20000; ++i) {
    const double value = std::ldexp(static_cast<double>(random() >> 11),
                                    static_cast<int>(random() % 42) - 79);
    const uint16_t bits = ToF16(value);
    if (bits >= 0x7c00) continue;
    const double found = FromF16(bits);
    const double above = FromF16(static_cast<uint16_t>(bits + 1));
    const double below =
        bits > 0 ? FromF16(static_cast<uint16_t>(bits - 1)) : -found;
    ASSERT_LE(std::abs(value - found), std::abs(value - above)) << value;
    ASSERT_LE(std::abs(value - found), std::abs(value - below)) << value;
  }
}

TEST(ElementsTest, CastsAndTellsWhatBecomesInfinite) {
  const std::vector<float> floats = {1, 1e30F, -1e30F,
                                     std::numeric_limits<float>::infinity()};
  std::string out;
  EXPECT_EQ(AppendCast(Dtype::kF32, absl::MakeConstSpan(BytesOf(floats)),
                       Dtype::kF16, out),
            1e30F);
  EXPECT_EQ(out, BytesOf<uint16_t>({0x3c00, 0x7c00, 0xfc00, 0x7c00}));
  out.clear();
  EXPECT_EQ(AppendCast(Dtype::kF32, absl::MakeConstSpan(BytesOf(floats)),
                       Dtype::kBF16, out),
            std::nullopt);
  out.clear();
  const std::vector<double> doubles = {0.1, 1e300};
  EXPECT_EQ(AppendCast(Dtype::kF64, absl::MakeConstSpan(BytesOf(doubles)),
                       Dtype::kF32, out),
            1e300);
  EXPECT_EQ(out,
            BytesOf<float>({0.1F, std::numeric_limits<float>::infinity()}));
  out.clear();
  AppendCast(Dtype::kBF16,
             absl::MakeConstSpan(BytesOf<uint16_t>({0x3f80, 0x0001})),
             Dtype::kF64, out);
  EXPECT_EQ(out, BytesOf<double>({1, 0x1p-133}));
  EXPECT_EQ(AppendCast(Dtype::kF32, {}, Dtype::kBF16, out), std::nullopt);
}

TEST(ElementsTest, ReadsNumbersAtAnyAddress) {
  std::vector<double> out;
  const std::string bytes = "x" + BytesOf<int32_t>({-7, 1 << 30});
  AppendNumbers(Dtype::kI32, absl::MakeConstSpan(bytes).subspan(1), out);
  AppendNumbers(Dtype::kU8, absl::MakeConstSpan("\xff", 1), out);
  AppendNumbers(Dtype::kI8, absl::MakeConstSpan("\xff", 1), out);
  AppendNumbers(Dtype::kBool, absl::MakeConstSpan("\x01", 1), out);
  AppendNumbers(Dtype::kU64,
                absl::MakeConstSpan(BytesOf<uint64_t>({~uint64_t{0}})), out);
  EXPECT_THAT(out, ElementsAre(-7, 1 << 30, 255, -1, 1, 0x1p64));
}

TEST(ElementsTest, Texts) {
  EXPECT_EQ(ElementText(Dtype::kF32, BytesOf<float>({0.1F})), "0.100000001");
  EXPECT_EQ(ElementText(Dtype::kF16, BytesOf<uint16_t>({0x2e66})), "0.099976");
  EXPECT_EQ(ElementText(Dtype::kI64, BytesOf<int64_t>({-9007199254740993})),
            "-9007199254740993");
  EXPECT_EQ(ElementText(Dtype::kI8, "\xff"), "-1");
  EXPECT_EQ(ElementText(Dtype::kBool, "\x01"), "true");
  EXPECT_EQ(ElementText(Dtype::kF8E4M3, "\x3c"), "0x3c");
}

TEST(ElementsTest, WhichAreNumbers) {
  EXPECT_TRUE(IsFloat(Dtype::kBF16));
  EXPECT_FALSE(IsFloat(Dtype::kI32));
  EXPECT_TRUE(IsNumber(Dtype::kI32));
  EXPECT_TRUE(IsNumber(Dtype::kBool));
  EXPECT_FALSE(IsNumber(Dtype::kF8E4M3));
  EXPECT_FALSE(IsNumber(Dtype::kC64));
  EXPECT_FALSE(IsNumber(Dtype::kF4));
}

}  // namespace
}  // namespace fsdp::checkpoint::tool
