#include "base/utf8.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

TEST(Utf8Test, KnowsUtf8) {
  EXPECT_TRUE(IsUtf8(""));
  EXPECT_TRUE(IsUtf8("a\xC3\xA4"));
  EXPECT_FALSE(IsUtf8("a\xC3"));
}

TEST(Utf8Test, WritesCharactersOfEveryLength) {
  std::string text;
  for (const unsigned code : {0x7Fu, 0x80u, 0xE4u, 0x7FFu, 0x800u, 0x20ACu,
                              0xFFFFu, 0x10000u, 0x1F600u, 0x10FFFFu}) {
    AppendUtf8(code, text);
  }
  EXPECT_EQ(text,
            "\x7F\xC2\x80\xC3\xA4\xDF\xBF\xE0\xA0\x80\xE2\x82\xAC"
            "\xEF\xBF\xBF\xF0\x90\x80\x80\xF0\x9F\x98\x80"
            "\xF4\x8F\xBF\xBF");
}

TEST(Utf8Test, FindsTheEndOfEveryCharacter) {
  for (unsigned code = 0; code < 0x110000; ++code) {
    if (code >= 0xD800 && code < 0xE000) continue;
    std::string text;
    AppendUtf8(code, text);
    const size_t length = code < 0x80      ? 1
                          : code < 0x800   ? 2
                          : code < 0x10000 ? 3
                                           : 4;
    ASSERT_EQ(text.size(), length) << code;
    ASSERT_EQ(Utf8Length(text), length) << code;
    ASSERT_EQ(Utf8Length(absl::StrCat(text, "\x80")), length) << code;
    text.pop_back();
    ASSERT_EQ(Utf8Length(text), 0) << code;
  }
}

// Counts the sequences that are characters: there are as many as characters.
TEST(Utf8Test, NothingElseIsACharacter) {
  int found[4] = {};
  for (unsigned bytes = 0; bytes < 0x1000000; ++bytes) {
    const char text[] = {static_cast<char>(bytes >> 16),
                         static_cast<char>(bytes >> 8),
                         static_cast<char>(bytes)};
    const size_t length = Utf8Length(absl::string_view(text, 3));
    ASSERT_LE(length, 3);
    ++found[length];
  }
  EXPECT_EQ(found[1], 0x80 * 0x10000);
  EXPECT_EQ(found[2], (0x800 - 0x80) * 0x100);
  EXPECT_EQ(found[3], 0x10000 - 0x800 - (0xE000 - 0xD800));
  int of_four = 0;
  for (unsigned bytes = 0; bytes < 0x1000000; ++bytes) {
    const char text[] = {static_cast<char>(0xF0 | (bytes >> 20)),
                         static_cast<char>(bytes >> 12),
                         static_cast<char>(0x80 | (bytes >> 6 & 0x3F)),
                         static_cast<char>(0x80 | (bytes & 0x3F))};
    if (Utf8Length(absl::string_view(text, 4)) == 4) ++of_four;
  }
  EXPECT_EQ(of_four, 0x110000 - 0x10000);
}

}  // namespace
}  // namespace fsdp
