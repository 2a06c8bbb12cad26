#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/testing/status_matchers.h"
#include "examples/llama/generation/loaded_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(TokenTextTest, TokensAreNumbersWithAnythingBetween) {
  for (const char* const text :
       {"1,2,3", " 1 2\n3\n", "1, 2,\t3,", "1\r\n2\r\n3"}) {
    ASSERT_OK_AND_ASSIGN(const std::vector<int64_t> tokens, ParseTokens(text));
    EXPECT_THAT(tokens, ElementsAre(1, 2, 3)) << text;
  }
  ASSERT_OK_AND_ASSIGN(const std::vector<int64_t> none, ParseTokens(" \n"));
  EXPECT_THAT(none, IsEmpty());
  for (const char* const text :
       {"1 two", "1.5", "0x10", "99999999999999999999"}) {
    EXPECT_THAT(ParseTokens(text), StatusIs(absl::StatusCode::kInvalidArgument,
                                            HasSubstr("is no token")))
        << text;
  }
}

// Returns what is shown after each byte.
std::string Shown(absl::string_view text) {
  std::vector<std::string> parts;
  PrintableText printable;
  for (const int64_t byte : BytesOf(text)) parts.push_back(printable.Add(byte));
  parts.push_back(printable.Finish());
  EXPECT_EQ(printable.Finish(), "");
  return absl::StrJoin(parts, "|");
}

TEST(TokenTextTest, CharactersAreShownWhenTheyAreWhole) {
  EXPECT_EQ(Shown(""), "");
  EXPECT_EQ(Shown("a\n\t"), "a|\n|\t|");
  EXPECT_EQ(Shown("\u00f6"), "|\u00f6|");
  EXPECT_EQ(Shown("a\U0001f98a"), "a||||\U0001f98a|");
}

TEST(TokenTextTest, WhatIsNoTextIsAQuestionMark) {
  const std::pair<absl::string_view, std::string> cases[] = {
      {"\x1b[", "?|[|"},    // terminals take it for a command
      {"\xc2\x9b", "|?|"},  // the same as one character
      {"\xff", "?|"},
      {"\x80", "?|"},                  // never first in UTF-8
      {"\xc3", "|?"},                  // cut off at the end
      {"\xc3g", "|?g|"},               // cut off by another character
      {"\xe2\x82g", "||??g|"},         // the same for several bytes
      {"\xc3\xc3\xb6", "|?|\u00f6|"},  // cut off by one that is as long
      {"\xed\xa0\x80", "||???|"},      // half of a pair
  };
  for (const auto& [text, shown] : cases) EXPECT_EQ(Shown(text), shown);
}

TEST(TokenTextTest, TokensThatAreNoBytesAreQuestionMarks) {
  PrintableText printable;
  EXPECT_EQ(printable.Add(256), "?");
  EXPECT_EQ(printable.Add(0xC3), "");
  EXPECT_EQ(printable.Add(300), "??");
  EXPECT_EQ(printable.Add('a'), "a");
}

TEST(TokenTextTest, BytesAreTokensFromZeroTo255) {
  EXPECT_THAT(BytesOf("a\xff"), ElementsAre(97, 255));
}

}  // namespace
}  // namespace llama
