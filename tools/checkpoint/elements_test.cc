#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/checkpoint/tensor_figures.h"

namespace fsdp::checkpoint::tool {
namespace {

using ::testing::ElementsAre;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

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
  for (const Case& c : std::vector<Case>{{0, 0x0000},
                                         {1, 0x3c00},
                                         {-2, 0xc000},
                                         {0x1.554p-2, 0x3555},
                                         {65504, 0x7bff},    // the largest
                                         {0x1p-14, 0x0400},  // normal
                                         {0x1p-24, 0x0001},  // the smallest
                                         {0x1.ff8p-15, 0x03ff},
                                         {kInfinity, 0x7c00},
                                         {-kInfinity, 0xfc00}}) {
    EXPECT_EQ(FromF16(c.bits), c.value) << c.value;
  }
  EXPECT_TRUE(std::signbit(FromF16(0x8000)));
  EXPECT_TRUE(std::isnan(FromF16(0x7e00)));
}

TEST(ElementsTest, TableOfBF16) {
  EXPECT_EQ(FromBF16(0x3f80), 1);
  EXPECT_EQ(FromBF16(0xc049), -3.140625);
  EXPECT_EQ(FromBF16(0x0001), 0x1p-133);
  EXPECT_EQ(FromBF16(0xff80), -kInfinity);
  EXPECT_TRUE(std::isnan(FromBF16(0x7fc0)));
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
  EXPECT_TRUE(IsNumber(Dtype::kI32));
  EXPECT_TRUE(IsNumber(Dtype::kBool));
  EXPECT_FALSE(IsNumber(Dtype::kF8E4M3));
  EXPECT_FALSE(IsNumber(Dtype::kC64));
  EXPECT_FALSE(IsNumber(Dtype::kF4));
}

}  // namespace
}  // namespace fsdp::checkpoint::tool
