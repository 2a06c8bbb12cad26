#include "checkpoint/format/tensor_info.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <set>
#include <string>

#include "absl/status/status.h"

namespace fsdp::checkpoint {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 4;

TEST(DtypeTest, EachHasANameOfItsOwn) {
  std::set<std::string> names;
  for (int i = 0; i < kNumDtypes; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    EXPECT_TRUE(names.insert(std::string(NameOf(dtype))).second);
    EXPECT_EQ(DtypeNamed(NameOf(dtype)), dtype);
  }
  EXPECT_FALSE(DtypeNamed("F31").has_value());
  EXPECT_FALSE(DtypeNamed("").has_value());
}

// The digits in a name are its bits.
TEST(DtypeTest, BitsAreThoseOfTheName) {
  for (int i = 0; i < kNumDtypes; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    const std::string name(NameOf(dtype));
    const size_t digits = name.find_first_of("0123456789");
    const int bits = digits == std::string::npos
                         ? 8  // BOOL
                         : std::stoi(name.substr(digits));
    EXPECT_EQ(BitsOf(dtype), bits) << name;
    EXPECT_EQ(ItemBytes(dtype), bits % 8 == 0 ? bits / 8 : 0) << name;
  }
}

TEST(TensorInfoTest, Bytes) {
  EXPECT_EQ(*BytesOf({"scalar", Dtype::kF64, {}}), 8);
  EXPECT_EQ(*BytesOf({"empty", Dtype::kF32, {3, 0, 5}}), 0);
  EXPECT_EQ(*BytesOf({"prime", Dtype::kBF16, {7, 11}}), 154);
  EXPECT_EQ(*BytesOf({"packed", Dtype::kF4, {2, 3}}), 3);
  EXPECT_EQ(*BytesOf({"six bits", Dtype::kF6E2M3, {4}}), 3);
}

TEST(TensorInfoTest, WhatCannotBeIsNamed) {
  EXPECT_THAT(BytesOf({"w", Dtype::kF4, {3}}).status().message(),
              HasSubstr("tensor \"w\", F4[3]: does not come to whole bytes"));
  EXPECT_EQ(BytesOf({"w", Dtype::kF32, {2, -1}}).status().code(),
            absl::StatusCode::kInvalidArgument);
  // A zero does not hide a negative size, and no product overflows before it.
  EXPECT_FALSE(NumelOf({"w", Dtype::kU8, {0, -1}}).ok());
  EXPECT_EQ(*NumelOf({"w", Dtype::kU8, {kHuge, kHuge, 0}}), 0);
  EXPECT_FALSE(NumelOf({"w", Dtype::kU8, {kHuge, 5}}).ok());
  EXPECT_FALSE(BytesOf({"w", Dtype::kF32, {kHuge}}).ok());
}

}  // namespace
}  // namespace fsdp::checkpoint
