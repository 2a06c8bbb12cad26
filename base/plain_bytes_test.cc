#include "base/plain_bytes.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::testing::IsEmpty;

TEST(PlainBytesTest, WhatIsCutOffIsMissingAndAllBehindIt) {
  std::string bytes;
  AppendValue<uint8_t>(bytes, 7);
  AppendList<int32_t>(bytes, {1, -2});
  AppendText(bytes, "text");
  for (size_t size = 0; size <= bytes.size(); ++size) {
    BytesReader reader(absl::string_view(bytes).substr(0, size));
    EXPECT_EQ(reader.Take<uint8_t>(), size >= 1 ? 7 : 0);
    const std::vector<int32_t> list = reader.TakeList<int32_t>();
    EXPECT_EQ(list, size >= 17 ? std::vector<int32_t>({1, -2})
                               : std::vector<int32_t>());
    EXPECT_EQ(reader.TakeText(), size == bytes.size() ? "text" : "");
    EXPECT_EQ(reader.ok(), size == bytes.size());
  }
}

// Counts that no memory has, and that overflow when they are multiplied.
TEST(PlainBytesTest, CountsThatCannotBe) {
  for (const int64_t count : {int64_t{-1}, INT64_MIN, INT64_MAX, int64_t{3},
                              (int64_t{1} << 62) + 1}) {
    std::string bytes;
    AppendValue(bytes, count);
    AppendValue<int64_t>(bytes, 5);
    BytesReader reader(bytes);
    EXPECT_THAT(reader.TakeList<int32_t>(), IsEmpty());
    EXPECT_FALSE(reader.ok());
    EXPECT_EQ(reader.Take<int64_t>(), 0);
  }
  std::string none;
  AppendList<int32_t>(none, {});
  BytesReader reader(none);
  EXPECT_THAT(reader.TakeList<int32_t>(), IsEmpty());
  EXPECT_TRUE(reader.ok());
  EXPECT_EQ(reader.left(), 0);
}

}  // namespace
}  // namespace fsdp
