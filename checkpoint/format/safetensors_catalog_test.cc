#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/format/catalog.h"
#include "checkpoint/format/file_plan.h"
#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/format/tensor_info.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// A file of such tensors, with what DCP says of them if it is not empty.
SafetensorsFile File(std::string name, const std::vector<TensorInfo>& tensors,
                     const std::string& sharding = "") {
  SafetensorsFile file{std::move(name), {{}, *PlaceTensors(tensors), 4096}};
  if (!sharding.empty()) {
    file.header.metadata[std::string(kShardingInfoKey)] = sharding;
  }
  std::sort(file.header.tensors.begin(), file.header.tensors.end(),
            [](const PlacedTensor& a, const PlacedTensor& b) {
              return a.begin < b.begin;
            });
  return file;
}

TEST(SafetensorsCatalogTest, TensorsAreWholeWithoutShardingInfo) {
  ASSERT_OK_AND_ASSIGN(
      Catalog catalog,
      CatalogOfSafetensors(
          {File("1", {{"a", Dtype::kU8, {3}}, {"b", Dtype::kF32, {2}}}),
           File("2", {{"c", Dtype::kF32, {}}})}));
  EXPECT_EQ(catalog.files()[0].bytes, 4096 + 11);
  EXPECT_THAT(*RunsOf(*catalog.Find("a"), 1, 3),
              ElementsAre(FileRun{{0, 4096 + 9, 2}, 0}));
  EXPECT_THAT(*RunsOf(*catalog.Find("c"), 0, 1),
              ElementsAre(FileRun{{1, 4096, 4}, 0}));
  EXPECT_THAT(CatalogOfSafetensors({File("1", {{"a", Dtype::kU8, {3}}}),
                                    File("2", {{"a", Dtype::kU8, {3}}})}),
              StatusIs(kInvalid, HasSubstr("is in 1 as well")));
}

TEST(SafetensorsCatalogTest, PiecesOfRanksAreJoined) {
  const std::vector<SafetensorsFile> files = {
      File("2", {{"w", Dtype::kU8, {1, 3}}},
           R"({"w": {"saved_offsets": [2, 0]}})"),
      File("1", {{"w", Dtype::kU8, {2, 3}}, {"s", Dtype::kU8, {}}},
           R"({"w": {"saved_offsets": [0, 0]}, "s": {"saved_offsets": []}})")};
  ASSERT_OK_AND_ASSIGN(Catalog catalog, CatalogOfSafetensors(files));
  EXPECT_THAT(catalog.Find("w")->info.shape, ElementsAre(3, 3));
  EXPECT_THAT(*RunsOf(*catalog.Find("w"), 4, 8),
              ElementsAre(FileRun{{1, 4100, 2}, 0}, FileRun{{0, 4096, 2}, 2}));
  // The first is missing.
  EXPECT_THAT(CatalogOfSafetensors({files[0]}),
              StatusIs(kInvalid, HasSubstr("element [0, 0] is in none")));
}

TEST(SafetensorsCatalogTest, NewerKeysHaveSeveralPiecesAndTheShape) {
  const std::vector<SafetensorsFile> files = {
      File("1", {{"w.1", Dtype::kU8, {1}}, {"w.0", Dtype::kU8, {2}}}, R"({
          "w.0": {"logical_fqn": "w", "saved_offsets": [0], "global_shape": [3]},
          "w.1": {"logical_fqn": "w", "saved_offsets": [2], "global_shape": [3]}
          })")};
  ASSERT_OK_AND_ASSIGN(Catalog catalog, CatalogOfSafetensors(files));
  EXPECT_EQ(catalog.tensors().size(), 1);
  EXPECT_THAT(*RunsOf(*catalog.Find("w"), 0, 3),
              ElementsAre(FileRun{{0, 4097, 2}, 0}, FileRun{{0, 4096, 1}, 2}));
  EXPECT_THAT(CatalogOfSafetensors({File(
                  "1", {{"w", Dtype::kU8, {2}}},
                  R"({"w": {"saved_offsets": [0], "global_shape": [3]}})")}),
              StatusIs(kInvalid, HasSubstr("element [2] is in none")));
}

struct Hostile {
  absl::string_view sharding;  // of U8 "w" [1, 3] beside U8 "x" [1]
  absl::string_view message;
};

class HostileShardingTest : public ::testing::TestWithParam<Hostile> {};

TEST_P(HostileShardingTest, IsRefusedWithItsReason) {
  EXPECT_THAT(CatalogOfSafetensors({File(
                  "1", {{"w", Dtype::kU8, {1, 3}}, {"x", Dtype::kU8, {1}}},
                  std::string(GetParam().sharding))}),
              StatusIs(kInvalid, HasSubstr(std::string(GetParam().message))));
}

INSTANTIATE_TEST_SUITE_P(
    All, HostileShardingTest,
    ::testing::Values(
        Hostile{"{", "1: JSON, byte 1"}, Hostile{"[]", "expected an object"},
        Hostile{R"({"w": 1})", "DCP_SHARDING_INFO of \"w\": it has no"},
        Hostile{R"({"w": {"saved_offsets": 1}})", "is no list of integers"},
        Hostile{R"({"w": {"saved_offsets": [-1, 0]}})", "is no list of"},
        Hostile{R"({"w": {"saved_offsets": [], "global_shape": [0.5]}})",
                "\"global_shape\" is no list"},
        Hostile{R"({"w": {"saved_offsets": [], "logical_fqn": 1}})",
                "\"logical_fqn\" is no string"},
        Hostile{R"({"w": {"saved_offsets": [0]}})",
                "1, tensor \"w\": is U8[1, 3], but at [0]"},
        Hostile{R"({"w": {"saved_offsets": [0, 9223372036854775807]}})",
                "beyond what 64 bits count"},
        Hostile{R"({"w": {"saved_offsets": [0, 0]}})",
                "1, tensor \"x\": is not in the file's DCP_SHARDING_INFO"},
        Hostile{R"({"w": {"saved_offsets": [0, 0]},
                    "x": {"saved_offsets": [0], "logical_fqn": "w"}})",
                "another dtype, shape or number of dimensions"},
        Hostile{R"({"w": {"saved_offsets": [0, 0], "global_shape": [1]},
                    "x": {"saved_offsets": [0]}})",
                "does not lie inside"}));

FileIndex Index(absl::string_view json) { return *ParseFileIndex(json); }

TEST(HuggingFaceCatalogTest, IndexAndFilesAgree) {
  ASSERT_OK_AND_ASSIGN(
      Catalog catalog,
      CatalogOfHuggingFace(
          Index(R"({"weight_map": {"b": "2", "a": "1", "c": "2"}})"),
          {File("1", {{"a", Dtype::kU8, {3}}}),
           File("2", {{"c", Dtype::kU8, {1}}, {"b", Dtype::kU8, {2}}})}));
  EXPECT_EQ(catalog.tensors().size(), 3);
  EXPECT_THAT(*RunsOf(*catalog.Find("b"), 0, 2),
              ElementsAre(FileRun{{1, 4097, 2}, 0}));
}

TEST(HuggingFaceCatalogTest, AllDifferencesAreReportedAtOnce) {
  const FileIndex index = Index(
      R"({"weight_map": {"a": "1", "gone": "1", "moved": "2", "far": "3"}})");
  const absl::StatusOr<Catalog> catalog =
      CatalogOfHuggingFace(index, {File("1", {{"a", Dtype::kU8, {3}},
                                              {"moved", Dtype::kU8, {1}},
                                              {"new", Dtype::kU8, {1}}}),
                                   File("2", {}), File("4", {})});
  EXPECT_THAT(
      catalog,
      StatusIs(kInvalid, AllOf(HasSubstr("tensor \"gone\" is missing in 1"),
                               HasSubstr("tensor \"moved\" is missing in 2"),
                               HasSubstr("file 3 is missing"),
                               HasSubstr("file 4 is not in the index"),
                               ::testing::Not(HasSubstr("\"far\"")))));
}

TEST(HuggingFaceCatalogTest, TheIndexDecidesWhichFileHasATensor) {
  ASSERT_OK_AND_ASSIGN(
      Catalog catalog,
      CatalogOfHuggingFace(
          Index(R"({"weight_map": {"a": "1", "b": "2"}})"),
          {File("1", {{"a", Dtype::kU8, {3}}, {"b", Dtype::kU8, {7}}}),
           File("2", {{"b", Dtype::kU8, {2}}, {"old", Dtype::kU8, {1}}})}));
  EXPECT_EQ(catalog.tensors().size(), 2);
  EXPECT_THAT(*RunsOf(*catalog.Find("b"), 0, 2),
              ElementsAre(FileRun{{1, 4096, 2}, 0}));
}

TEST(HuggingFaceCatalogTest, AListOfDifferencesEnds) {
  FileIndex index = Index(R"({"weight_map": {"a": "1"}})");
  for (int i = 0; i < 60; ++i) {
    index.weights.emplace_back(std::to_string(i), 0);
  }
  EXPECT_THAT(
      CatalogOfHuggingFace(index, {File("1", {{"a", Dtype::kU8, {1}}})}),
      StatusIs(kInvalid, HasSubstr("; and 10 more")));
}

}  // namespace
}  // namespace fsdp::checkpoint
