#include "base/json.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"

namespace fsdp {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

TEST(JsonTest, PrintsEveryKindOfValue) {
  const Json json(Json::Object{{"null", Json()},
                               {"yes", true},
                               {"count", int64_t{-3}},
                               {"third", 0.1},
                               {"whole", 2.0},
                               {"text", "a"},
                               {"list", std::vector<int>{1, 2}},
                               {"empty", Json::Object{}}});
  EXPECT_EQ(json.ToString(),
            R"({"null": null, "yes": true, "count": -3, "third": 0.1, )"
            R"("whole": 2.0, "text": "a", "list": [1, 2], "empty": {}})");
}

TEST(JsonTest, EscapesWhatAStringMayNotHold) {
  const std::string hostile = absl::StrCat("\"\\\n\t", std::string(1, '\0'),
                                           "\x7f", "\xC3\xA4", "\xFF", "end");
  EXPECT_EQ(Json(hostile).ToString(),
            "\"\\\"\\\\\\n\\u0009\\u0000\\u007f"
            "\xC3\xA4\xEF\xBF\xBD"
            "end\"");
}

TEST(JsonTest, WhatIsNotFiniteIsNull) {
  EXPECT_EQ(Json(std::numeric_limits<double>::infinity()).ToString(), "null");
  EXPECT_EQ(Json(std::numeric_limits<double>::quiet_NaN()).ToString(), "null");
}

TEST(JsonTest, ReadsBackWhatItPrints) {
  const Json json(Json::Object{
      {"a \"quoted\"\x01 name", Json::Array{1e300, -0.1, 5e-324, int64_t{7}}},
      {"nested",
       Json::Object{{"x", Json::Array{Json(), false, "\xF0\x9F\x98\x80"}}}},
      {"largest", std::numeric_limits<int64_t>::max()}});
  ASSERT_OK_AND_ASSIGN(Json read, Json::Parse(json.ToString()));
  EXPECT_EQ(read, json);
}

TEST(JsonTest, ReadsEscapesAndNumbers) {
  ASSERT_OK_AND_ASSIGN(Json json,
                       Json::Parse(" [\"\\u0041\\ud83d\\ude00\\/\" , 1e2, 10, "
                                   "-0, 9223372036854775808 ] "));
  const Json::Array& array = *json.As<Json::Array>();
  EXPECT_EQ(*array[0].As<std::string>(), "A\xF0\x9F\x98\x80/");
  EXPECT_EQ(*array[1].As<double>(), 100.0);
  EXPECT_EQ(*array[2].As<int64_t>(), 10);
  EXPECT_EQ(array[3].NumberOr(1), 0);
  EXPECT_EQ(array[4].NumberOr(0), 9223372036854775808.0);
  EXPECT_EQ(array[0].NumberOr(-1), -1);
}

TEST(JsonTest, FindLooksUpMembersOfObjectsOnly) {
  ASSERT_OK_AND_ASSIGN(Json json, Json::Parse(R"({"a": {"b": 1}})"));
  ASSERT_NE(json.Find("a"), nullptr);
  EXPECT_EQ(json.Find("a")->Find("b")->NumberOr(0), 1);
  EXPECT_EQ(json.Find("b"), nullptr);
  EXPECT_EQ(Json(1).Find("a"), nullptr);
}

TEST(JsonTest, AMapIsAnObjectWhoseMembersHaveTypes) {
  const Json json = std::map<std::string, std::map<std::string, int>>(
      {{"b", {{"x", 1}}}, {"a", {}}});
  EXPECT_EQ(json.ToString(), R"({"a": {}, "b": {"x": 1}})");
  EXPECT_EQ(*json.Find("b")->FindAs<int64_t>("x"), 1);
  EXPECT_EQ(json.Find("b")->FindAs<double>("x"), nullptr);
  EXPECT_EQ(json.FindAs<int64_t>("x"), nullptr);
}

TEST(JsonTest, RefusesWhatIsNotJson) {
  for (const char* text : {"",
                           " ",
                           "{",
                           "[1,]",
                           "{\"a\":1,}",
                           "{a:1}",
                           "{\"a\" 1}",
                           "nul",
                           "01",
                           "-",
                           "1.",
                           "1e",
                           "+1",
                           "\"",
                           "\"\x01\"",
                           "\"\\x\"",
                           "\"\\u12g4\"",
                           "\"\\u12\"",
                           "\"\\ud800\"",
                           "\"\\udc00\"",
                           "\"\\ud800\\u0041\"",
                           "\"\xC3\"",
                           "\"\xC0\x80\"",
                           "\"\xED\xA0\x80\"",
                           "\"\xF5\x80\x80\x80\"",
                           "1 2",
                           "{}x",
                           "1e999",
                           "[1}",
                           "NaN"}) {
    EXPECT_THAT(Json::Parse(text),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("byte")))
        << text;
  }
  EXPECT_THAT(Json::Parse(R"({"a": 1, "a": 2})"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("key \"a\" is given twice")));
}

TEST(JsonTest, AKeyGivenTwiceIsFoundInLargeObjectsToo) {
  for (const int members : {1, 7, 8, 9, 1000}) {
    std::string text = "{";
    for (int i = 0; i < members; ++i) absl::StrAppend(&text, "\"", i, "\":1,");
    EXPECT_OK(Json::Parse(text + "\"last\": 1}"));
    for (const int twice : {0, members - 1}) {
      EXPECT_THAT(Json::Parse(absl::StrCat(text, "\"", twice, "\": 1}")),
                  StatusIs(absl::StatusCode::kInvalidArgument,
                           HasSubstr("is given twice")));
    }
  }
}

TEST(JsonTest, TheMembersOfAMemberAreVisitedInTurn) {
  std::string seen;
  const auto visit_as = [&seen](const char* kind) {
    return [&seen, kind](const std::string& key, const Json& value) {
      if (key == "stop") return absl::AbortedError("stopped");
      absl::StrAppend(&seen, kind, key, "=", value.ToString(), ";");
      return absl::OkStatus();
    };
  };
  const auto parse = [&](const std::string& text, int64_t max_values) {
    return ParseMembers(text, "map", max_values, visit_as("outer "),
                        visit_as("inner "));
  };
  EXPECT_OK(parse(R"({"a": {"map": {"x": 1}}, "map" : {"b": [2], "c": 3 } ,
                      "d": 4})",
                  3));
  EXPECT_EQ(seen,
            R"(outer a={"map": {"x": 1}};outer map={};inner b=[2];inner c=3;)"
            R"(outer d=4;)");
  seen.clear();
  EXPECT_OK(parse(R"({"map": {}})", 1));
  EXPECT_OK(parse(R"({"map": [1]})", 2));
  EXPECT_EQ(seen, "outer map={};outer map=[1];");
  EXPECT_THAT(parse(R"({"map": {"stop": 1, oops)", 9),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("stopped")));
  for (const char* text :
       {"", "[]", R"({"map": {)", R"({"map": {"a": 1,}})", R"({"map": {"a"}})",
        R"({"map": {"a": 1, "a": 1}})", R"({"map": {}, "map": {}})",
        R"({"map": {} {}})", R"({"map": {}} 1)", R"({"map": {"a": [1, 2, 3]}})",
        R"({"map": {"a": 1})"}) {
    EXPECT_THAT(parse(text, 3),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("byte")))
        << text;
  }
}

// Neither way of parsing takes one level more.
TEST(JsonTest, MembersAreNestedAsDeepAsInAWholeText) {
  const auto ignore = [](const std::string&, const Json&) {
    return absl::OkStatus();
  };
  for (const int depth : {62, 63, 64}) {
    const std::string text =
        absl::StrCat(R"({"map": {"a": )", std::string(depth, '['),
                     std::string(depth, ']'), "}}");
    EXPECT_EQ(ParseMembers(text, "map", 99, ignore, ignore).ok(),
              Json::Parse(text).ok())
        << depth;
  }
}

TEST(JsonTest, MembersAreVisitedInTurn) {
  std::string seen;
  const auto visit = [&seen](const std::string& key, const Json& value) {
    absl::StrAppend(&seen, key, "=", value.ToString(), ";");
    return absl::OkStatus();
  };
  EXPECT_OK(
      Json::ParseMembers(R"( {"b": [1, {"x": 2}], "a" : null } )", 9, visit));
  EXPECT_OK(Json::ParseMembers("{}", 0, visit));
  EXPECT_EQ(seen, R"(b=[1, {"x": 2}];a=null;)");
}

TEST(JsonTest, AMemberHasNoMoreValuesThanItMay) {
  const auto visit = [](const std::string&, const Json&) {
    return absl::OkStatus();
  };
  constexpr char kText[] = R"({"a": [1, 2], "b": [1, 2]})";
  EXPECT_OK(Json::ParseMembers(kText, 3, visit));
  EXPECT_THAT(Json::ParseMembers(kText, 2, visit),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("more than 2 values")));
}

TEST(JsonTest, RefusesDeepNestingInsteadOfOverflowingTheStack) {
  EXPECT_OK(Json::Parse(std::string(60, '[') + std::string(60, ']')));
  EXPECT_THAT(Json::Parse(std::string(1'000'000, '[')),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("nested too deep")));
}

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
