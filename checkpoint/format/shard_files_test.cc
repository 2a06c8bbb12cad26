#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
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
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

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
  ASSERT_OK_AND_ASSIGN(std::vector<ShardFile> files,
                       PlanShardFiles(2, {{w, 3, 16}, {b, 0, 2}}));
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

TEST(ShardFilesTest, WhatCannotBeShardedIsNamed) {
  const TensorInfo w{"w", Dtype::kF32, {4}};
  EXPECT_THAT(PlanShardFiles(0, {{w, 0, 5}}),
              StatusIs(kInvalid, HasSubstr("\"w\", F32[4]: has no elements 0 "
                                           "to 5")));
  EXPECT_THAT(PlanShardFiles(0, {{w, 3, 2}}),
              StatusIs(kInvalid, HasSubstr("has no elements")));
  EXPECT_THAT(PlanShardFiles(0, {{w, 0, 1}, {w, 1, 2}}),
              StatusIs(kInvalid, HasSubstr("given twice")));
  EXPECT_THAT(PlanShardFiles(0, {{{"w", Dtype::kF4, {4}}, 0, 4}}),
              StatusIs(kInvalid, HasSubstr("cannot be sharded")));
}

// Where an element of a tensor lies, as those who write say.
struct Written {
  int file;
  int64_t offset;
};

// What all ranks together plan for some tensors.
struct AllRanks {
  std::vector<SafetensorsFile> files;
  std::vector<std::vector<Written>> written;  // of each tensor's elements
};

std::vector<TensorInfo> RandomTensors(std::mt19937& random) {
  std::vector<TensorInfo> tensors;
  for (int i = 0; i < 4; ++i) {
    constexpr Dtype kDtypes[] = {Dtype::kU8, Dtype::kBF16, Dtype::kF64};
    std::vector<int64_t> shape(random() % 4);
    for (int64_t& size : shape) size = static_cast<int64_t>(random() % 6);
    tensors.push_back({absl::StrCat("w", i), kDtypes[random() % 3], shape});
  }
  return tensors;
}

void AddFile(const std::vector<TensorInfo>& tensors, const ShardFile& file,
             AllRanks& all) {
  for (const ShardPiece& piece : file.pieces) {
    const int64_t item = ItemBytes(tensors[piece.range].dtype);
    for (int64_t i = piece.begin; i < piece.end; ++i) {
      all.written[piece.range][i] = {static_cast<int>(all.files.size()),
                                     piece.offset + item * (i - piece.begin)};
    }
  }
  ASSERT_OK_AND_ASSIGN(
      SafetensorsHeader header,
      ParseSafetensorsHeader(absl::string_view(file.header).substr(8),
                             file.bytes));
  all.files.push_back({file.name, header});
}

AllRanks PlanAll(const std::vector<TensorInfo>& tensors, int ranks) {
  AllRanks all;
  for (const TensorInfo& tensor : tensors) {
    all.written.emplace_back(*NumelOf(tensor));
  }
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<RankRange> ranges;
    for (const TensorInfo& tensor : tensors) {
      const int64_t numel = *NumelOf(tensor);
      ranges.push_back(
          {tensor, numel * rank / ranks, numel * (rank + 1) / ranks});
    }
    const std::vector<ShardFile> files = *PlanShardFiles(rank, ranges);
    for (const ShardFile& file : files) {
      AddFile(tensors, file, all);
    }
  }
  return all;
}

// Though every file has them by the size of their elements.
TEST(ShardFilesTest, TensorsKeepTheirOrder) {
  const std::vector<TensorInfo> tensors = {{"b", Dtype::kBF16, {3}},
                                           {"none", Dtype::kF32, {0}},
                                           {"d", Dtype::kF64, {4}},
                                           {"a", Dtype::kF32, {}}};
  for (const int ranks : {1, 2, 5}) {
    ASSERT_OK_AND_ASSIGN(const Catalog catalog,
                         CatalogOfSafetensors(PlanAll(tensors, ranks).files));
    ASSERT_EQ(catalog.tensors().size(), tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_EQ(catalog.tensors()[i].info, tensors[i]);
    }
  }
}

// All ranks' files, read as one catalog, have every element where it was put.
TEST(ShardFilesTest, ACatalogFindsWhatRanksWrite) {
  std::mt19937 random(5);
  for (int round = 0; round < 100; ++round) {
    const std::vector<TensorInfo> tensors = RandomTensors(random);
    const AllRanks all = PlanAll(tensors, 1 + static_cast<int>(random() % 5));
    ASSERT_OK_AND_ASSIGN(Catalog catalog, CatalogOfSafetensors(all.files));
    for (size_t i = 0; i < tensors.size(); ++i) {
      const StoredTensor* tensor = catalog.Find(tensors[i].name);
      ASSERT_NE(tensor, nullptr);
      ASSERT_EQ(tensor->info, tensors[i]);
      const auto numel = static_cast<int64_t>(all.written[i].size());
      ASSERT_OK_AND_ASSIGN(std::vector<FileRun> runs,
                           RunsOf(*tensor, 0, numel));
      const int64_t item = ItemBytes(tensors[i].dtype);
      int64_t next = 0;
      for (const FileRun& run : runs) {
        for (int64_t byte = 0; byte < run.bytes; byte += item, ++next) {
          ASSERT_EQ(run.file, all.written[i][next].file);
          ASSERT_EQ(run.offset + byte, all.written[i][next].offset);
        }
      }
      ASSERT_EQ(next, numel);
    }
  }
}

}  // namespace
}  // namespace fsdp::checkpoint
