#include "checkpoint/format/safetensors_header.h"

#include <limits>

#include "base/testing/status_matchers.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// Returns the JSON of a header of FormatSafetensorsHeader().
absl::string_view JsonOf(absl::string_view header) {
  return header.substr(kSafetensorsLengthBytes);
}

TEST(SafetensorsHeaderTest, LargerElementsComeFirstThenTheOrderGiven) {
  ASSERT_OK_AND_ASSIGN(std::vector<PlacedTensor> placed,
                       PlaceTensors({{"mask", Dtype::kBool, {3}},
                                     {"b", Dtype::kF32, {2, 3}},
                                     {"packed", Dtype::kF4, {2}},
                                     {"none", Dtype::kF32, {0, 5}},
                                     {"a", Dtype::kF32, {}},
                                     {"step", Dtype::kI64, {1}},
                                     {"half", Dtype::kBF16, {5}}}));
  std::vector<int64_t> begins;
  begins.reserve(placed.size());
  for (const PlacedTensor& tensor : placed) begins.push_back(tensor.begin);
  EXPECT_THAT(begins, ElementsAre(46, 8, 49, 32, 32, 0, 36));
  EXPECT_EQ(placed[2].end, 50);
  EXPECT_EQ(placed[1].info.name, "b");
}

TEST(SafetensorsHeaderTest, ReadsBackWhatItWrites) {
  std::vector<TensorInfo> tensors = {{"b \"quoted\" \xC3\xA4", {}, {2, 3}},
                                     {"", Dtype::kF64, {0}}};
  for (int i = 0; i < kNumDtypes; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    tensors.push_back({std::string(NameOf(dtype)), dtype, {4, i}});
  }
  ASSERT_OK_AND_ASSIGN(std::vector<PlacedTensor> placed, PlaceTensors(tensors));
  const SafetensorsMetadata metadata = {{"format", "pt"}, {"\n", "\""}};
  ASSERT_OK_AND_ASSIGN(std::string header,
                       FormatSafetensorsHeader(placed, metadata));
  auto file_bytes = static_cast<int64_t>(header.size());
  for (const PlacedTensor& tensor : placed) {
    file_bytes += tensor.end - tensor.begin;
  }
  EXPECT_THAT(
      ParseSafetensorsLength(header.substr(0, 8), file_bytes),
      ::testing::Property(&absl::StatusOr<int64_t>::value, header.size() - 8));
  ASSERT_OK_AND_ASSIGN(SafetensorsHeader read,
                       ParseSafetensorsHeader(JsonOf(header), file_bytes));
  EXPECT_EQ(read.metadata, metadata);
  EXPECT_EQ(read.data_begin, header.size());
  EXPECT_THAT(read.tensors, ::testing::UnorderedElementsAreArray(placed));
  int64_t end = 0;
  for (const PlacedTensor& tensor : read.tensors) {
    EXPECT_EQ(tensor.begin, end);
    end = tensor.end;
  }
}

TEST(SafetensorsHeaderTest, IsTheSameBytesEachTimeAndFillsBlocks) {
  // Names have all lengths around a block, so that the padding is 0 once.
  bool is_full = false;
  for (int length = 3900; length < 4100; ++length) {
    const std::vector<PlacedTensor> tensors = {
        {{std::string(length, 'n'), Dtype::kU8, {2}}, 0, 2}};
    ASSERT_OK_AND_ASSIGN(std::string header,
                         FormatSafetensorsHeader(tensors, {}));
    EXPECT_EQ(header.size() % 4096, 0);
    EXPECT_EQ(header, *FormatSafetensorsHeader(tensors, {}));
    is_full |= header.back() == '}';
  }
  EXPECT_TRUE(is_full);
  ASSERT_OK_AND_ASSIGN(std::string none, FormatSafetensorsHeader({}, {}));
  EXPECT_EQ(none.substr(0, 11),
            absl::string_view("\xF8\x0F\0\0\0\0\0\0{} ", 11));
}

TEST(SafetensorsHeaderTest, RefusesToWriteWhatNobodyCouldRead) {
  EXPECT_THAT(FormatSafetensorsHeader({{{"\xFF", {}, {0}}, 0, 0}}, {}),
              StatusIs(kInvalid, HasSubstr("has no such name")));
  EXPECT_THAT(FormatSafetensorsHeader({{{"__metadata__", {}, {0}}, 0, 0}}, {}),
              StatusIs(kInvalid, HasSubstr("has no such name")));
  EXPECT_THAT(FormatSafetensorsHeader({}, {{"note", "\xFF"}}),
              StatusIs(kInvalid, HasSubstr("metadata \"note\"")));
  constexpr size_t kTooLong = 100'000'000;
  EXPECT_THAT(
      FormatSafetensorsHeader({}, {{"long", std::string(kTooLong, 'x')}}),
      StatusIs(kInvalid, HasSubstr("write them into more files")));
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 8;
  std::vector<TensorInfo> many(9, {"w", Dtype::kU8, {kMost}});
  EXPECT_THAT(PlaceTensors(many),
              StatusIs(kInvalid, HasSubstr("offset does not fit")));
  EXPECT_THAT(PlaceTensors({{"w", Dtype::kF4, {3}}}),
              StatusIs(kInvalid, HasSubstr("whole bytes")));
}

TEST(SafetensorsHeaderTest, AcceptsWhatTheFormatDoes) {
  ASSERT_OK_AND_ASSIGN(
      SafetensorsHeader header,
      ParseSafetensorsHeader(R"({"__metadata__": {"format": "pt"}})", 42));
  EXPECT_THAT(header.tensors, ::testing::IsEmpty());
  EXPECT_THAT(header.metadata, ElementsAre(::testing::Pair("format", "pt")));
  EXPECT_EQ(header.data_begin, 42);
  EXPECT_OK(ParseSafetensorsHeader(R"({"__metadata__":null})", 29));
  constexpr absl::string_view kMore =
      R"({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], "x": 1}})";
  EXPECT_OK(ParseSafetensorsHeader(kMore, kMore.size() + 9));
}

TEST(SafetensorsHeaderTest, RefusesALengthTheFileCannotHold) {
  const auto length = [](std::vector<uint8_t> bytes, int64_t file_bytes) {
    return ParseSafetensorsLength(std::string(bytes.begin(), bytes.end()),
                                  file_bytes);
  };
  EXPECT_THAT(length({1, 2, 3}, 3), StatusIs(kInvalid, HasSubstr("3 bytes")));
  EXPECT_THAT(length({0, 0, 0, 0, 0, 0, 0, 0}, 7),
              StatusIs(kInvalid, HasSubstr("7 bytes")));
  EXPECT_THAT(length({9, 0, 0, 0, 0, 0, 0, 0}, 16),
              StatusIs(kInvalid, HasSubstr("header of 9 bytes, 8 follow")));
  EXPECT_OK(length({8, 0, 0, 0, 0, 0, 0, 0}, 16));
  EXPECT_THAT(length({255, 255, 255, 255, 255, 255, 255, 255}, 1 << 30),
              StatusIs(kInvalid, HasSubstr("18446744073709551615")));
  // 100,000,000 is 0x05F5E100.
  EXPECT_OK(length({0x00, 0xE1, 0xF5, 0x05, 0, 0, 0, 0}, int64_t{1} << 40));
  EXPECT_THAT(length({0x01, 0xE1, 0xF5, 0x05, 0, 0, 0, 0}, int64_t{1} << 40),
              StatusIs(kInvalid, HasSubstr("the most that the format")));
}

TEST(SafetensorsHeaderTest, SaysWhatAnotherFileIs) {
  for (const auto& [begin, what] :
       {std::make_pair("PK\x03\x04\x14\x04\x14\x04", "torch.save()"),
        std::make_pair("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46", "a pickle"),
        std::make_pair("version ", "git lfs pull")}) {
    EXPECT_THAT(ParseSafetensorsLength(begin, 1000),
                StatusIs(kInvalid, HasSubstr(what)));
  }
}

// Returns a header of one tensor.
std::string A(absl::string_view dtype, absl::string_view shape,
              absl::string_view offsets) {
  return absl::StrCat(R"({"a": {"dtype": )", dtype, R"(, "shape": )", shape,
                      R"(, "data_offsets": )", offsets, "}}");
}

constexpr char kF32[] = "\"F32\"";

struct Hostile {
  std::string header;
  std::string message;
};

std::vector<Hostile> AllHostile() {
  return {
      {"", "does not begin with '{'"},
      {" {}", "does not begin with '{'"},
      {"{", "byte"},
      {"{\"\xFF\": 1}", "not UTF-8"},
      {R"({"a": 1})", "\"a\": expected an object"},
      {R"({"a": {"dtype": "F32", "shape": [2]}})", "\"a\": expected an object"},
      {R"({"a": {"dtype": "F32", "shape": [2], "offsets": [0, 8]}})",
       "\"a\": expected an object"},
      {A("1", "[2]", "[0, 8]"), "\"dtype\" is no string"},
      {A("\"F33\"", "[2]", "[0, 8]"), "unknown dtype \"F33\""},
      {A(kF32, "[-2]", "[0, 8]"), "\"shape\" is [-2]"},
      {A(kF32, "2", "[0, 8]"), "\"shape\" is 2"},
      {A(kF32, "[2.0]", "[0, 8]"), "\"shape\" is [2.0]"},
      {A("\"F4\"", "[3]", "[0, 2]"), "whole bytes"},
      {A(kF32, "[4611686018427387904, 4]", "[0, 8]"), "does not fit 64 bits"},
      {A(kF32, "[4611686018427387904, 4, 0]", "[0, 0]"),
       "does not fit 64 bits"},
      {R"({"__metadata__": {"a": 1}})", "strings only"},
      {R"({"__metadata__": "a"})", "is no object"},
      {R"({"__metadata__": {}, "__metadata__": {}})", "given twice"},
      {R"({"__metadata__": {"a": "", "a": ""}})", "given twice"},
      {A(kF32, "[2]", "[0]"), "no pair"},
      {A(kF32, "[2]", "[8, 0]"), "no pair"},
      {A(kF32, "[2]", "[-8, 0]"), "\"data_offsets\" is [-8, 0]"},
      {A(kF32, "[3]", "[0, 8]"),
       "F32[3] takes 12 bytes, but its data_offsets span 8"},
      {A(kF32, "[1]", "[4, 8]"), "\"a\": begins at byte 4, after a gap from 0"},
      {R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
           "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}})",
       "\"b\": begins at byte 4, inside the tensor before it"},
      {R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
           "a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}})",
       "key \"a\" is given twice"},
      {A(kF32, "[4]", "[0, 16]"), "truncated"},
      {A(kF32, "[1]", "[0, 4]"), "longer than it says"}};
}

// The files have 8 bytes of data.
TEST(HostileHeaderTest, IsRefusedWithItsReason) {
  for (const auto& [header, message] : AllHostile()) {
    EXPECT_THAT(ParseSafetensorsHeader(header, 8 + header.size() + 8),
                StatusIs(kInvalid, HasSubstr(message)))
        << header;
  }
}

}  // namespace
}  // namespace fsdp::checkpoint
