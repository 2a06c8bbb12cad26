#include "checkpoint/huggingface/file_plan.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/safetensors/safetensors_header.h"
#include "checkpoint/tensor/tensor_info.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// Tensors "0", "1", ... of so many bytes.
std::vector<TensorInfo> OfBytes(const std::vector<int64_t>& sizes) {
  std::vector<TensorInfo> tensors;
  tensors.reserve(sizes.size());
  for (const int64_t size : sizes) {
    tensors.push_back({absl::StrCat(tensors.size()), Dtype::kU8, {size}});
  }
  return tensors;
}

// The number of the file of each tensor, from 1, and at last how many.
std::vector<int> FilesOf(const std::vector<int64_t>& sizes, int64_t limit) {
  FilePlanOptions options;
  options.max_file_bytes = limit;
  const absl::StatusOr<FilePlan> plan = PlanFiles(OfBytes(sizes), options);
  std::vector<int> files;
  for (const PlannedTensor& tensor : plan->tensors) {
    files.push_back(tensor.file + 1);
  }
  files.push_back(static_cast<int>(plan->files.size()));
  return files;
}

TEST(FilePlanTest, FilesAreCutAsHuggingfaceHubDoes) {
  // The cases of its own test.
  EXPECT_THAT(FilesOf({6, 10, 30, 2, 2}, 100), ElementsAre(1, 1, 1, 1, 1, 1));
  EXPECT_THAT(FilesOf({6, 10, 30, 2, 2}, 10), ElementsAre(1, 3, 2, 4, 4, 4));
  // At the limit, one beyond it, larger than it, and nothing.
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
  EXPECT_EQ(plan.index, "");
  EXPECT_EQ(plan.index_name, "");
  EXPECT_EQ(plan.total_bytes, 8);
  EXPECT_EQ(plan.files[0].bytes, 4096 + 8);
  EXPECT_EQ(plan.tensors[1].offset, 4096 + 3);
  EXPECT_EQ(plan.tensors[1].bytes, 5);
}

TEST(FilePlanTest, NoTensorIsAFileAllTheSame) {
  ASSERT_OK_AND_ASSIGN(FilePlan plan, PlanFiles({}));
  ASSERT_EQ(plan.files.size(), 1);
  EXPECT_EQ(plan.files[0].bytes, 4096);
}

TEST(FilePlanTest, TheIndexNamesAFileForEachTensor) {
  FilePlanOptions options;
  options.stem = "exp_avg";
  options.max_file_bytes = 8;
  ASSERT_OK_AND_ASSIGN(FilePlan plan, PlanFiles(OfBytes({5, 4, 4}), options));
  EXPECT_EQ(plan.index_name, "exp_avg.safetensors.index.json");
  EXPECT_EQ(plan.index, R"({
  "metadata": {"total_size": 13},
  "weight_map": {
    "0": "exp_avg-00001-of-00002.safetensors",
    "1": "exp_avg-00002-of-00002.safetensors",
    "2": "exp_avg-00002-of-00002.safetensors"
  }
}
)");
  ASSERT_OK_AND_ASSIGN(FileIndex index, ParseFileIndex(plan.index));
  EXPECT_EQ(index.total_bytes, 13);
  EXPECT_THAT(index.weights, ElementsAre(std::pair("0", 0), std::pair("1", 1),
                                         std::pair("2", 1)));
  EXPECT_EQ(index.files[1], plan.files[1].name);
}

// What the plan says of places is what a reader finds in the headers.
TEST(FilePlanTest, OffsetsAreThoseOfTheHeaders) {
  std::vector<TensorInfo> tensors;
  for (int i = 0; i < 3 * kNumDtypes; ++i) {
    const auto dtype = static_cast<Dtype>(i % kNumDtypes);
    tensors.push_back({absl::StrCat("w", i), dtype, {4, i / 2}});
  }
  FilePlanOptions options;
  options.max_file_bytes = 1000;
  ASSERT_OK_AND_ASSIGN(FilePlan plan, PlanFiles(tensors, options));
  ASSERT_GT(plan.files.size(), 2);
  size_t found = 0;
  for (size_t file = 0; file < plan.files.size(); ++file) {
    const PlannedFile& planned = plan.files[file];
    ASSERT_OK_AND_ASSIGN(
        SafetensorsHeader header,
        ParseSafetensorsHeader(absl::string_view(planned.header).substr(8),
                               planned.bytes));
    EXPECT_EQ(header.metadata.at("format"), "pt");
    for (const PlacedTensor& tensor : header.tensors) {
      const auto i = std::find(tensors.begin(), tensors.end(), tensor.info) -
                     tensors.begin();
      ASSERT_LT(i, tensors.size());
      EXPECT_EQ(plan.tensors[i].file, file);
      EXPECT_EQ(plan.tensors[i].offset, header.data_begin + tensor.begin);
      EXPECT_EQ(plan.tensors[i].bytes, tensor.end - tensor.begin);
      ++found;
    }
  }
  EXPECT_EQ(found, tensors.size());
}

TEST(FilePlanTest, WhatCannotBeWrittenIsNamed) {
  EXPECT_THAT(PlanFiles({{"w", {}, {1}}, {"b", {}, {1}}, {"w", {}, {2}}}),
              StatusIs(kInvalid, HasSubstr("tensor \"w\" is given twice")));
  EXPECT_THAT(PlanFiles({{"w", {}, {-1}}}),
              StatusIs(kInvalid, HasSubstr("\"w\"")));
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 8;
  EXPECT_THAT(PlanFiles(OfBytes(std::vector<int64_t>(9, kMost))),
              StatusIs(kInvalid, HasSubstr("tensors up to \"8\"")));
  FilePlanOptions options;
  options.stem = "../model";
  EXPECT_THAT(PlanFiles({}, options),
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
  EXPECT_EQ(plan.files.size(), 6);
  // 0.7 s when built for speed; a sanitizer may take much longer.
  EXPECT_LT(absl::Now() - begin, absl::Seconds(45));
}

}  // namespace
}  // namespace fsdp::checkpoint
