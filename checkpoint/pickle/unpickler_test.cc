#include "checkpoint/pickle/unpickler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/pickle/allow_list.h"
#include "checkpoint/pickle/document.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const AllowList& Allowed() {
  static const auto* const allowed =
      new AllowList({"torch.Size", "torch.float32", "collections.OrderedDict"});
  return *allowed;
}

absl::StatusOr<Document> Read(absl::string_view pickle) {
  return Unpickle(std::string(pickle), Allowed());
}

// With zero bytes in it.
template <size_t kSize>
std::string Raw(const char (&text)[kSize]) {
  return std::string(text, kSize - 1);
}

std::string Repeat(absl::string_view what, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) absl::StrAppend(&all, what);
  return all;
}

void ExpectRefused(absl::string_view pickle, absl::string_view why) {
  EXPECT_THAT(Read(pickle).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr(std::string(why))));
}

TEST(UnpicklerTest, Scalars) {
  // [None, True, False, 7, 300, -2, 1 << 40, -(1 << 63), 2.5, "ab", b"cd"]
  ASSERT_OK_AND_ASSIGN(
      const Document document,
      Read(Raw("\x80\x04](N\x88\x89K\x07M\x2c\x01J\xfe\xff\xff\xff"
               "\x8a\x06\0\0\0\0\0\x01\x8a\x08\0\0\0\0\0\0\0\x80"
               "G\x40\x04\0\0\0\0\0\0\x8c\x02"
               "abC\x02"
               "cde.")));
  const std::vector<NodeId>& items = document.root().items;
  ASSERT_EQ(items.size(), 11u);
  EXPECT_EQ(document[items[0]].kind, NodeKind::kNone);
  EXPECT_EQ(document[items[1]].integer, 1);
  EXPECT_EQ(document[items[1]].kind, NodeKind::kBool);
  EXPECT_EQ(document[items[2]].integer, 0);
  EXPECT_EQ(document[items[3]].integer, 7);
  EXPECT_EQ(document[items[4]].integer, 300);
  EXPECT_EQ(document[items[5]].integer, -2);
  EXPECT_EQ(document[items[6]].integer, int64_t{1} << 40);
  EXPECT_EQ(document[items[7]].integer, std::numeric_limits<int64_t>::min());
  EXPECT_EQ(document[items[8]].real, 2.5);
  EXPECT_EQ(document[items[9]].text, "ab");
  EXPECT_EQ(document[items[9]].kind, NodeKind::kString);
  EXPECT_EQ(document[items[10]].text, "cd");
  EXPECT_EQ(document[items[10]].kind, NodeKind::kBytes);
}

TEST(UnpicklerTest, LongsOfAnyLength) {
  EXPECT_EQ(Read(Raw("\x8a\0."))->root().integer, 0);
  EXPECT_EQ(Read("\x8a\x01\xff.")->root().integer, -1);
  EXPECT_EQ(Read("\x8a\x02\xff\x7f.")->root().integer, 32767);
  EXPECT_EQ(Read(Raw("\x8b\x01\0\0\0\x80."))->root().integer, -128);
}

TEST(UnpicklerTest, ContainersAndTheMemo) {
  // {"a": (1,), "b": [that tuple, that tuple]}
  ASSERT_OK_AND_ASSIGN(const Document document,
                       Read(Raw("\x80\x04}(\x8c\x01"
                                "aK\x01\x85\x94\x8c\x01"
                                "b](h\0h\0eu.")));
  const std::vector<NodeId>& items = document.root().items;
  ASSERT_EQ(items.size(), 4u);
  EXPECT_EQ(document[items[0]].text, "a");
  EXPECT_EQ(document[items[1]].kind, NodeKind::kTuple);
  EXPECT_THAT(document[items[3]].items, ElementsAre(items[1], items[1]));
}

TEST(UnpicklerTest, ObjectsAreNamedNotMade) {
  // torch.Size((2, 3)), then a state.
  ASSERT_OK_AND_ASSIGN(const Document document,
                       Read("\x80\x02"
                            "ctorch\nSize\nK\x02K\x03\x86\x85R}b."));
  const Node& root = document.root();
  EXPECT_EQ(root.kind, NodeKind::kObject);
  EXPECT_EQ(document[root.global].text, "torch.Size");
  EXPECT_EQ(document[document[root.args].items[0]].items.size(), 2u);
  EXPECT_EQ(document[root.state].kind, NodeKind::kDict);
}

TEST(UnpicklerTest, OtherNamesAreRefused) {
  constexpr absl::string_view kWhy =
      "posix.system is not what a checkpoint needs: refused; nothing was "
      "executed";
  ExpectRefused("cposix\nsystem\n\x8c\x02ls\x85R.", kWhy);
  ExpectRefused("\x8c\x05posix\x8c\x06system\x93\x8c\x02ls\x85R.", kWhy);
  // A module is no prefix.
  ExpectRefused("ctorch\nSize.__class__\n.", "torch.Size.__class__");
  ExpectRefused("c\n\n.", "pickle: . is not");
}

TEST(UnpicklerTest, WhatNoCheckpointHas) {
  const std::pair<std::string, std::string> kCases[] = {
      {"", "ends after 0 bytes"},
      {".", "takes a value where there is none"},
      {"NN.", "left over"},
      {"(N.", "left over"},
      {"N(a.", "adds to what is not there"},
      {"K", "in the midst"},
      {"\x8f.", "opcode 0x8f at byte 0 is not what a checkpoint needs"},
      {"I1\n.", "opcode 0x49"},
      {"\x80\x06N.", "protocol 6"},
      {Raw("\x8a\x09\0\0\0\0\0\0\0\0\1."), "an integer of 9 bytes"},
      {Raw("\x8b\xff\xff\xff\xff."), "an integer of 4294967295 bytes"},
      {Raw("X\xff\xff\xff\xff"
           "ab."),
       "in the midst"},
      {"\x8d\xff\xff\xff\xff\xff\xff\xff\xff.", "in the midst"},
      {"h\x05.", "asks for memo 5"},
      {Raw("Nr\xff\xff\xff\x7f."), "sets memo 2147483647 in 7 bytes"},
      {"q\x01.", "takes a value"},
      {"t.", "takes a mark"},
      {"Na.", "adds to what is not there"},
      {"NNa.", "adds items to what takes none"},
      {"](NNs.", "adds to what is not there"},
      {"}(Nu.", "a key without a value"},
      {"(Nd.", "a key without a value"},
      {"NNR.", "calls what is no name"},
      {"}}b.", "gives a state to what takes none"},
      {"0N.", "drops a value"},
      {"ctorch\nSi", "a line does not end"},
      {"NN\x93.", "a global whose name is no text"},
  };
  for (const auto& [pickle, why] : kCases) ExpectRefused(pickle, why);
}

TEST(UnpicklerTest, NestingIsBounded) {
  const auto nested = [](int depth) {
    return absl::StrCat(Repeat("]", depth), Repeat("a", depth - 1), ".");
  };
  EXPECT_OK(Read(nested(kMaxPickleDepth)));
  ExpectRefused(nested(kMaxPickleDepth + 1), "more than 200 deep");
  ExpectRefused(nested(1000003), "more than 200 deep");
}

TEST(UnpicklerTest, AListThatContainsItselfIsRefused) {
  ExpectRefused(Raw("]q\0h\0a."), "a value contains itself");
}

// Each list holds the one before ten times.
TEST(UnpicklerTest, ReferencesDoNotBlowUp) {
  std::string bomb = Raw("]q\0");
  for (char i = 0; i < 30; ++i) {
    bomb += "](";
    for (int j = 0; j < 10; ++j) bomb += absl::StrCat("h", std::string(1, i));
    bomb += absl::StrCat("eq", std::string(1, static_cast<char>(i + 1)));
  }
  ExpectRefused(absl::StrCat("(", bomb, "t."),
                "refers to the same values so often");
}

// One long text, many times.
TEST(UnpicklerTest, TextsDoNotBlowUp) {
  const std::string text(60000, 'x');
  const std::string pickle =
      absl::StrCat(Raw("](X\x60\xea\0\0"), text, Raw("q\0"),
                   Repeat(Raw("h\0"), 20000), "e.");
  ExpectRefused(pickle, "refers to the same values so often");
}

TEST(UnpicklerTest, ManyValuesTakeTimeInProportion) {
  constexpr int kCount = 1000003;
  ASSERT_OK_AND_ASSIGN(const Document document,
                       Read(absl::StrCat("](", Repeat("K\x07", kCount), "e.")));
  EXPECT_EQ(document.root().items.size(), static_cast<size_t>(kCount));
}

TEST(UnpicklerTest, TextsOutliveAMove) {
  ASSERT_OK_AND_ASSIGN(Document document, Read("\x8c\x01"
                                               "a."));
  const Document moved = std::move(document);
  EXPECT_EQ(moved.root().text, "a");
}

}  // namespace
}  // namespace fsdp::checkpoint
