#include "examples/gpt/safetensors_header.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gpt {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

TEST(SafetensorsHeaderTest, ReadsBackWhatItWrites) {
  ASSERT_OK_AND_ASSIGN(std::vector<SafetensorsEntry> entries,
                       PlaceSafetensors({{"b \"quoted\"", "F32", {2, 3}, 0, 0},
                                         {"none", "I64", {0, 5}, 0, 0},
                                         {"a", "BF16", {}, 0, 0},
                                         {"last", "U8", {7}, 0, 0}}));
  EXPECT_EQ(entries[0].end, 24);
  EXPECT_EQ(entries[2].begin, 24);
  EXPECT_EQ(entries[3].end, 33);
  const std::string header = FormatSafetensorsHeader(entries);
  EXPECT_EQ(header.size() % 8, 0);
  const int64_t file_bytes = header.size() + 33;
  ASSERT_OK_AND_ASSIGN(int64_t length,
                       ParseSafetensorsLength(header.substr(0, 8), file_bytes));
  EXPECT_EQ(length, header.size() - 8);
  ASSERT_OK_AND_ASSIGN(std::vector<SafetensorsEntry> read,
                       ParseSafetensorsHeader(header.substr(8), 33));
  EXPECT_EQ(read, entries);
}

TEST(SafetensorsHeaderTest, AcceptsMetadataAndNoTensors) {
  ASSERT_OK_AND_ASSIGN(
      std::vector<SafetensorsEntry> entries,
      ParseSafetensorsHeader(R"({"__metadata__": {"format": "pt"}})", 0));
  EXPECT_THAT(entries, IsEmpty());
}

TEST(SafetensorsHeaderTest, RefusesALengthTheFileCannotHold) {
  const auto length = [](std::vector<uint8_t> bytes, int64_t file_bytes) {
    return ParseSafetensorsLength(std::string(bytes.begin(), bytes.end()),
                                  file_bytes);
  };
  EXPECT_THAT(length({1, 2, 3}, 3), StatusIs(kInvalid, HasSubstr("3 bytes")));
  EXPECT_THAT(length({9, 0, 0, 0, 0, 0, 0, 0}, 16),
              StatusIs(kInvalid, HasSubstr("header of 9 bytes, 8 follow")));
  EXPECT_OK(length({8, 0, 0, 0, 0, 0, 0, 0}, 16));
  EXPECT_THAT(length({255, 255, 255, 255, 255, 255, 255, 255}, 1 << 30),
              StatusIs(kInvalid, HasSubstr("18446744073709551615")));
  EXPECT_THAT(length({0, 0, 0, 64, 0, 0, 0, 0}, int64_t{1} << 40),
              StatusIs(kInvalid, HasSubstr("the most that the format")));
}

struct Hostile {
  absl::string_view header;
  absl::string_view message;
};

class HostileHeaderTest : public ::testing::TestWithParam<Hostile> {};

TEST_P(HostileHeaderTest, IsRefusedWithItsReason) {
  EXPECT_THAT(ParseSafetensorsHeader(GetParam().header, 8),
              StatusIs(kInvalid, HasSubstr(std::string(GetParam().message))));
}

INSTANTIATE_TEST_SUITE_P(
    All, HostileHeaderTest,
    ::testing::Values(
        Hostile{"", "does not begin with '{'"},
        Hostile{" {}", "does not begin with '{'"}, Hostile{"{", "byte"},
        Hostile{R"({"a": 1})", "\"a\": expected an object"},
        Hostile{R"({"a": {"dtype": "F32", "shape": [2]}})",
                "\"a\": expected an object"},
        Hostile{R"({"a": {"dtype": "F32", "shape": [2], "offsets": [0, 8]}})",
                "\"a\": expected an object"},
        Hostile{R"({"a": {"dtype": 1, "shape": [2], "data_offsets": [0, 8]}})",
                "\"dtype\" is no string"},
        Hostile{
            R"({"a": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}})",
            "unknown dtype \"F33\""},
        Hostile{
            R"({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}})",
            "\"shape\" is [-2]"},
        Hostile{
            R"({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}})",
            "\"shape\" is 2"},
        Hostile{
            R"({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}})",
            "\"shape\" is [2.0]"},
        Hostile{R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}})",
                "no pair"},
        Hostile{
            R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}})",
            "no pair"},
        Hostile{
            R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}})",
            "F32[3] takes 12 bytes, but its data_offsets span 8"},
        Hostile{R"({"a": {"dtype": "F32", "shape": [4611686018427387904, 4],
                   "data_offsets": [0, 8]}})",
                "does not fit 64 bits"},
        Hostile{
            R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}})",
            "\"a\": begins at byte 4, after a gap from 0"},
        Hostile{R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                    "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}
                   })",
                "\"b\": begins at byte 4, inside the tensor before it"},
        Hostile{R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                    "a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}
                   })",
                "key \"a\" is given twice"},
        Hostile{
            R"({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}})",
            "truncated"},
        Hostile{
            R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})",
            "longer than it says"}));

}  // namespace
}  // namespace gpt
