#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/testing/allocations.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/huggingface/file_plan.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

TEST(FileIndexTest, TensorsKeepTheirOrderAndFilesAreSorted) {
  ASSERT_OK_AND_ASSIGN(FileIndex index, ParseFileIndex(R"({
      "metadata": {"total_size": 12, "total_parameters": 3},
      "weight_map": {"w": "2.safetensors", "a": "1.safetensors",
                     "b": "2.safetensors"}})"));
  EXPECT_EQ(index.total_bytes, 12);
  EXPECT_THAT(index.files, ElementsAre("1.safetensors", "2.safetensors"));
  EXPECT_THAT(index.weights,
              ElementsAre(Pair("w", 1), Pair("a", 0), Pair("b", 1)));
}

TEST(FileIndexTest, ATotalIsNotNeeded) {
  for (absl::string_view json :
       {R"({"weight_map": {}})", R"({"metadata": {}, "weight_map": {}})",
        R"({"metadata": null, "weight_map": {}})",
        R"({"metadata": {"total_size": null}, "weight_map": {}})"}) {
    ASSERT_OK_AND_ASSIGN(FileIndex index, ParseFileIndex(json));
    EXPECT_EQ(index.total_bytes, std::nullopt);
    EXPECT_THAT(index.weights, IsEmpty());
  }
  ASSERT_OK_AND_ASSIGN(
      FileIndex index,
      ParseFileIndex(
          R"({"metadata": {"total_size": 13e9}, "weight_map": {}})"));
  EXPECT_EQ(index.total_bytes, 13'000'000'000);
}

// The `i`th of the shortest names.
std::string ShortName(int i) {
  std::string name;
  for (; i > 0 || name.empty(); i /= 62) {
    constexpr absl::string_view kDigits =
        "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    name.push_back(kDigits[static_cast<size_t>(i % 62)]);
  }
  return name;
}

TEST(FileIndexTest, ManyTinyMembersTakeLittleMemory) {
  // Around where tables grow.
  for (const int members : {3000, 100'000, 114'000, 115'000, 131'073}) {
    std::string one_file, own_files, outside;
    for (int i = 0; i < members; ++i) {
      const std::string name = ShortName(i);
      absl::StrAppend(&one_file, i > 0 ? "," : "", "\"", name, "\":\"a\"");
      absl::StrAppend(&own_files, i > 0 ? "," : "", "\"", name, "\":\"", name,
                      "\"");
      absl::StrAppend(&outside, "\"", name, "\":0,");
    }
    for (const std::string& text :
         {absl::StrCat("{\"weight_map\":{", one_file, "}}"),
          absl::StrCat("{\"weight_map\":{", own_files, "}}"),
          absl::StrCat("{", outside, "\"weight_map\":{}}")}) {
      fsdp::testing::Allocations::Start();
      EXPECT_OK(ParseFileIndex(text));
      EXPECT_LE(fsdp::testing::Allocations::Peak(),
                32 * text.size() + (size_t{4} << 20))
          << members << ": " << text.substr(0, 40);
    }
  }
}

TEST(FileIndexTest, OtherMembersAreSmall) {
  std::string values = "0";
  for (int i = 0; i < 9'990; ++i) values += ",0";
  EXPECT_OK(ParseFileIndex(
      absl::StrCat(R"({"metadata":[)", values, R"(],"weight_map":{}})")));
  for (int i = 0; i < 1'000'000; ++i) values += ",0";
  fsdp::testing::Allocations::Start();
  for (const char* before :
       {R"({"metadata":[)", R"({"weight_map":[)", R"({"weight_map":{"w":[)"}) {
    EXPECT_THAT(ParseFileIndex(absl::StrCat(before, values)),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("more than 10000 values")));
  }
  EXPECT_LE(fsdp::testing::Allocations::Peak(),
            2 * values.size() + (size_t{4} << 20));
}

struct Hostile {
  absl::string_view json;
  absl::string_view message;
};

class HostileIndexTest : public ::testing::TestWithParam<Hostile> {};

TEST_P(HostileIndexTest, IsRefusedWithItsReason) {
  EXPECT_THAT(ParseFileIndex(GetParam().json),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr(std::string(GetParam().message))));
}

INSTANTIATE_TEST_SUITE_P(
    All, HostileIndexTest,
    ::testing::Values(
        Hostile{"", "byte 0"}, Hostile{"[]", "expected an object"},
        Hostile{"{}", "no object \"weight_map\""},
        Hostile{R"({"metadata": {"weight_map": {}}})",
                "no object \"weight_map\""},
        Hostile{R"({"weight_map": {}} {})", "text after the value"},
        Hostile{R"({"weight_map": ["w"]})", "no object \"weight_map\""},
        Hostile{R"({"weight_map": {"w": 1}})",
                "no file for tensor \"w\", but 1"},
        Hostile{R"({"weight_map": {"w": "../up.safetensors"}})",
                "tensor \"w\": \"../up.safetensors\" is no name of a file"},
        Hostile{R"({"weight_map": {"w": "/etc/passwd"}})",
                "\"/etc/passwd\" is no name"},
        Hostile{R"({"weight_map": {"w": ".."}})", "\"..\" is no name"},
        Hostile{R"({"weight_map": {"w": "a\u0000b"}})", "\"a\\000b\" is no"},
        Hostile{R"({"weight_map": {"w": ""}})", "\"\" is no name"},
        Hostile{R"({"weight_map": {"w": "a", "w": "b"}})", "given twice"},
        Hostile{R"({"weight_map": {}, "weight_map": {}})", "given twice"},
        Hostile{R"({"metadata": {"total_size": -1}, "weight_map": {}})",
                "total_size is -1"},
        Hostile{R"({"metadata": {"total_size": 1.5}, "weight_map": {}})",
                "total_size is 1.5"},
        Hostile{R"({"metadata": {"total_size": 1e30}, "weight_map": {}})",
                "total_size is 1e+30"},
        Hostile{R"({"metadata": {"total_size": "5"}, "weight_map": {}})",
                "total_size is \"5\""}));

}  // namespace
}  // namespace fsdp::checkpoint
