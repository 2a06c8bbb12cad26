#include "checkpoint/format/file_plan.h"

#include <cstddef>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/allocations.h"
#include "base/testing/status_matchers.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// Returns tensors "0", "1", ... of so many bytes.
std::vector<TensorInfo> OfBytes(const std::vector<int64_t>& sizes) {
  std::vector<TensorInfo> tensors;
  tensors.reserve(sizes.size());
  for (const int64_t size : sizes) {
    tensors.push_back({absl::StrCat(tensors.size()), Dtype::kU8, {size}});
  }
  return tensors;
}

// Returns the number of each tensor's file, from 1, and how many files there
// are.
std::vector<int> FilesOf(const std::vector<int64_t>& sizes, int64_t limit) {
  const auto plan = PlanFiles(OfBytes(sizes), "model", limit);
  std::vector<int> files;
  for (const auto& tensor : plan->tensors) {
    files.push_back(static_cast<int>(tensor.file) + 1);
  }
  const auto count = static_cast<int>(plan->files.size());
  files.push_back(count > 1 ? count - 1 : 1);  // without the index
  return files;
}

TEST(FilePlanTest, FilesAreCutAsHuggingfaceHubDoes) {
  // These cases are huggingface_hub's own.
  EXPECT_THAT(FilesOf({6, 10, 30, 2, 2}, 100), ElementsAre(1, 1, 1, 1, 1, 1));
  EXPECT_THAT(FilesOf({6, 10, 30, 2, 2}, 10), ElementsAre(1, 3, 2, 4, 4, 4));
  // These are at the limit, one byte beyond it, larger than it, and empty.
  EXPECT_THAT(FilesOf({4, 6}, 10), ElementsAre(1, 1, 1));
  EXPECT_THAT(FilesOf({4, 7}, 10), ElementsAre(1, 2, 2));
  EXPECT_THAT(FilesOf({11}, 10), ElementsAre(1, 1));
  EXPECT_THAT(FilesOf({11, 0, 3}, 10), ElementsAre(1, 2, 2, 2));
  EXPECT_THAT(FilesOf({}, 10), ElementsAre(1));
}

TEST(FilePlanTest, OneFileNeedsNoIndex) {
  ASSERT_OK_AND_ASSIGN(FilePlan plan, PlanFiles(OfBytes({3, 5})));
  ASSERT_EQ(plan.files.size(), 1);
  EXPECT_EQ(plan.files[0].name, "model.safetensors");
  EXPECT_EQ(plan.files[0].bytes, 4096 + 8);
  EXPECT_EQ(plan.tensors[1].offset, 4096 + 3);
  EXPECT_EQ(plan.tensors[1].bytes, 5);
}

TEST(FilePlanTest, TheIndexNamesAFileForEachTensor) {
  ASSERT_OK_AND_ASSIGN(FilePlan plan,
                       PlanFiles(OfBytes({5, 4, 4}), "exp_avg", 8));
  EXPECT_EQ(plan.files.back().name, "exp_avg.safetensors.index.json");
  EXPECT_EQ(plan.files.back().header, R"({
  "metadata": {"total_size": 13},
  "weight_map": {
    "0": "exp_avg-00001-of-00002.safetensors",
    "1": "exp_avg-00002-of-00002.safetensors",
    "2": "exp_avg-00002-of-00002.safetensors"
  }
}
)");
  ASSERT_OK_AND_ASSIGN(FileIndex index,
                       ParseFileIndex(plan.files.back().header));
  EXPECT_THAT(index.weights, ElementsAre(std::pair("0", 0), std::pair("1", 1),
                                         std::pair("2", 1)));
  EXPECT_EQ(index.files[1], plan.files[1].name);
}

TEST(FilePlanTest, WhatCannotBeWrittenIsNamed) {
  EXPECT_THAT(PlanFiles({{"w", {}, {-1}}}),
              StatusIs(kInvalid, HasSubstr("\"w\"")));
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 8;
  EXPECT_THAT(PlanFiles(OfBytes(std::vector<int64_t>(9, kMost))),
              StatusIs(kInvalid, HasSubstr("tensors up to \"8\"")));
  EXPECT_THAT(PlanFiles({}, "../model"),
              StatusIs(kInvalid, HasSubstr("is no name of a file")));
}

TEST(FilePlanTest, ManyTensorsTakeNoTimeToSpeakOf) {
  constexpr int kTensors = 200'000;
  std::vector<TensorInfo> tensors;
  tensors.reserve(kTensors);
  for (int i = 0; i < kTensors; ++i) {
    tensors.push_back({absl::StrCat("model.layers.", i, ".mlp.weight"),
                       Dtype::kBF16,
                       {64, 1024}});
  }
  const absl::Time begin = absl::Now();
  ASSERT_OK_AND_ASSIGN(FilePlan plan, PlanFiles(tensors));
  EXPECT_EQ(plan.files.size(), 6 + 1);
  // It takes 0.7 s when built for speed; a sanitizer may take much longer.
  EXPECT_LT(absl::Now() - begin, absl::Seconds(45));
}

using ::testing::IsEmpty;
using ::testing::Pair;

TEST(FileIndexTest, TensorsKeepTheirOrderAndFilesAreSorted) {
  ASSERT_OK_AND_ASSIGN(FileIndex index, ParseFileIndex(R"({
      "metadata": {"total_size": 12, "total_parameters": 3},
      "weight_map": {"w": "2.safetensors", "a": "1.safetensors",
                     "b": "2.safetensors"}})"));
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
    EXPECT_THAT(index.weights, IsEmpty());
  }
  EXPECT_OK(ParseFileIndex(
      R"({"metadata": {"total_size": 13e9}, "weight_map": {}})"));
}

// Returns the `i`th of the shortest names.
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
  // Numbers are around those where tables grow.
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

constexpr Hostile kHostile[] = {
    {"", "byte 0"},
    {"[]", "expected an object"},
    {"{}", "no object \"weight_map\""},
    {R"({"metadata": {"weight_map": {}}})", "no object \"weight_map\""},
    {R"({"weight_map": {}} {})", "text after the value"},
    {R"({"weight_map": ["w"]})", "no object \"weight_map\""},
    {R"({"weight_map": {"w": 1}})", "no file for tensor \"w\", but 1"},
    {R"({"weight_map": {"w": "../up.safetensors"}})",
     "tensor \"w\": \"../up.safetensors\" is no name of a file"},
    {R"({"weight_map": {"w": "/etc/passwd"}})", "\"/etc/passwd\" is no name"},
    {R"({"weight_map": {"w": ".."}})", "\"..\" is no name"},
    {R"({"weight_map": {"w": "a\u0000b"}})", "\"a\\000b\" is no"},
    {R"({"weight_map": {"w": ""}})", "\"\" is no name"},
    {R"({"weight_map": {"w": "a", "w": "b"}})", "given twice"},
    {R"({"weight_map": {}, "weight_map": {}})", "given twice"},
    {R"({"metadata": {"total_size": -1}, "weight_map": {}})",
     "total_size is -1"},
    {R"({"metadata": {"total_size": 1.5}, "weight_map": {}})",
     "total_size is 1.5"},
    {R"({"metadata": {"total_size": 1e30}, "weight_map": {}})",
     "total_size is 1e+30"},
    {R"({"metadata": {"total_size": "5"}, "weight_map": {}})",
     "total_size is \"5\""}};

TEST(HostileIndexTest, IsRefusedWithItsReason) {
  for (const Hostile& one : kHostile) {
    EXPECT_THAT(ParseFileIndex(one.json),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr(std::string(one.message))))
        << one.json;
  }
}

TEST(ShardingInfoTest, ReadsBackWhatItWrites) {
  const ShardingInfo info = {{"w", {"w", {8, 0}, {}}},
                             {"w.1", {"w", {}, std::vector<int64_t>{}}}};
  const std::string text = FormatShardingInfo(info);
  EXPECT_EQ(text, R"({"w": {"saved_offsets": [8, 0]}, )"
                  R"("w.1": {"saved_offsets": [], "logical_fqn": "w", )"
                  R"("global_shape": []}})");
  ASSERT_OK_AND_ASSIGN(ShardingInfo read, ParseShardingInfo(text));
  EXPECT_EQ(FormatShardingInfo(read), text);
}

TEST(ShardFilesTest, TheKthBoxIsInTheKthFile) {
  const TensorInfo w{"w", Dtype::kBF16, {4, 5}};
  const TensorInfo b{"b", Dtype::kF32, {7}};
  ASSERT_OK_AND_ASSIGN(auto files, PlanShardFiles(2, {{w, 3, 16}, {b, 0, 2}}));
  ASSERT_EQ(files.size(), 3);
  EXPECT_EQ(files[1].name, "shard-00003-model-00002-of-00003.safetensors");
  ASSERT_EQ(files[0].pieces.size(), 2);
  // Larger elements come first.
  EXPECT_EQ(files[0].pieces[0].range, 0);
  EXPECT_EQ(files[0].pieces[0].offset, 4096 + 8);
  EXPECT_EQ(files[0].pieces[1].range, 1);
  EXPECT_EQ(files[0].pieces[1].offset, 4096);
  EXPECT_EQ(files[0].bytes, 4096 + 8 + 4);
  EXPECT_EQ(files[1].pieces[0].begin, 5);
  EXPECT_EQ(files[1].pieces[0].end, 15);
  EXPECT_THAT(files[1].header,
              HasSubstr(R"({"DCP_SHARDING_INFO": "{\"w\": {\"saved_offsets\": )"
                        R"([1, 0], \"global_shape\": [4, 5], )"
                        R"(\"tensor_position\": 0}}", )"
                        R"("DCP_VERSION": "1.0", "format": "pt"})"));
}

TEST(ShardFilesTest, ARankWithoutRangesHasNoFile) {
  const TensorInfo w{"w", Dtype::kF32, {4}};
  EXPECT_THAT(*PlanShardFiles(1, {{w, 2, 2}}), IsEmpty());
  EXPECT_EQ(PlanShardFiles(0, {{w, 2, 2}})->size(), 1);
  // What has no elements is somewhere all the same, once.
  const TensorInfo none{"none", Dtype::kF32, {4, 0}};
  EXPECT_EQ(PlanShardFiles(0, {{none, 0, 0}})->size(), 1);
  EXPECT_THAT(*PlanShardFiles(1, {{none, 0, 0}}), IsEmpty());
}

TEST(ShardFilesTest, NamesHaveAStem) {
  const TensorInfo w{"w", Dtype::kF32, {4}};
  ASSERT_OK_AND_ASSIGN(const std::vector<ShardFile> files,
                       PlanShardFiles(100'000, {{w, 0, 4}}, "exp_avg"));
  EXPECT_EQ(files[0].name, "shard-100001-exp_avg-00001-of-00001.safetensors");
  const std::vector<std::pair<std::string, std::optional<std::string>>> names =
      {{files[0].name, "exp_avg"},
       {absl::StrCat("optimizer/", files[0].name), "optimizer/exp_avg"},
       {"shard-00001-a-00001-of-00002-00001-of-00002.safetensors",
        "a-00001-of-00002"},
       {"shard-00001-model-00001-of-00002.safetensors", "model"},
       {"shard-00001--00001-of-00002.safetensors", std::nullopt},
       {"shard-0001-model-00001-of-00002.safetensors", std::nullopt},
       {"shard-00001-model-0001-of-00002.safetensors", std::nullopt},
       {"shard-00001-model-00001-of-00002.safetensor", std::nullopt},
       {"shard-00001-00002-of-00003.safetensors", std::nullopt},
       {"shard-00001", std::nullopt},
       {"model-00001-of-00002.safetensors", std::nullopt},
       {"model.safetensors", std::nullopt},
       {"12345", std::nullopt},
       {"", std::nullopt}};
  for (const auto& [name, stem] : names) {
    EXPECT_EQ(StemOfShardFile(name), stem) << name;
  }
}

}  // namespace
}  // namespace fsdp::checkpoint
