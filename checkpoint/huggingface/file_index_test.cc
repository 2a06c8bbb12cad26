#include "checkpoint/huggingface/file_index.h"

#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/testing/status_matchers.h"
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
        Hostile{"", "byte 0"}, Hostile{"[]", "no object \"weight_map\""},
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
