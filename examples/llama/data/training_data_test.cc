// Goes from files to batches: each target of a file comes once in an epoch,
// over all ranks.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <vector>

#include "base/testing/status_matchers.h"
#include "examples/llama/data/token_batches.h"
#include "examples/llama/data/token_file.h"
#include "examples/llama/data/window_rows.h"
#include "examples/llama/testing/written_tokens.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::testing::IsEmpty;
using ::testing::Not;

constexpr int64_t kNumTokens = 241;
constexpr int64_t kSeq = 8;
constexpr int kWorldSizes[] = {1, 2, 3, 5};

// Token i is i + 1; documents have 1, 2, 3, ... tokens.
absl::StatusOr<TokenFile> Text() {
  WrittenTokens written;
  written.tokens.resize(kNumTokens);
  std::iota(written.tokens.begin(), written.tokens.end(), 1);
  for (int64_t begin = 0; begin < kNumTokens;) {
    written.begins.push_back(begin);
    begin += static_cast<int64_t>(written.begins.size());
  }
  return TokenFile::Open(WriteTokens("text", written));
}

// Counts how often each target comes behind the token that is one less.
void CountTargets(const Batch& batch, std::map<int64_t, int>& counts) {
  const at::Tensor tokens = batch.tokens.flatten();
  const at::Tensor targets = batch.targets.flatten();
  for (int64_t i = 0; i < targets.numel(); ++i) {
    const auto target = targets[i].item<int64_t>();
    if (target == kNoTarget) continue;
    EXPECT_EQ(tokens[i].item<int64_t>(), target - 1);
    ++counts[target];
  }
}

// Counts over as many epochs as a batch has rows.
std::map<int64_t, int> TrainedTargets(
    const std::shared_ptr<const RowSource>& source, int64_t batch_rows,
    int world_size) {
  std::map<int64_t, int> counts;
  for (int rank = 0; rank < world_size; ++rank) {
    TokenBatches batches =
        TokenBatches::Create(source, {batch_rows, rank, world_size}, 1).value();
    for (int64_t i = 0; i < source->num_rows(); ++i) {
      CountTargets(batches.Next().value(), counts);
    }
  }
  return counts;
}

std::map<int64_t, int> MeasuredTargets(
    const std::shared_ptr<const RowSource>& source, int64_t batch_rows,
    int world_size) {
  std::map<int64_t, int> counts;
  for (int rank = 0; rank < world_size; ++rank) {
    const EvaluationBatches batches =
        EvaluationBatches::Create(source, {batch_rows, rank, world_size})
            .value();
    for (int64_t i = 0; i < batches.num_batches(); ++i) {
      CountTargets(batches.Read(i).value(), counts);
    }
  }
  return counts;
}

std::map<int64_t, int> Each(int64_t first, int64_t last, int times) {
  std::map<int64_t, int> counts;
  for (int64_t target = first; target <= last; ++target) {
    counts[target] = times;
  }
  return counts;
}

TEST(TrainingDataTest, AStreamIsTrainedWithAllOfIt) {
  ASSERT_OK_AND_ASSIGN(const TokenFile file, Text());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<const RowSource> rows,
                       WindowRows::Create(file, kSeq, LastWindow::kLeftOut));
  for (int world_size : kWorldSizes) {
    EXPECT_EQ(TrainedTargets(rows, 30, world_size), Each(2, kNumTokens, 30));
  }
}

TEST(TrainingDataTest, DocumentsAreTrainedWithAllOfThem) {
  ASSERT_OK_AND_ASSIGN(const TokenFile file, Text());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<const RowSource> rows,
                       PackedRows::Create(file, kSeq, 1));
  std::map<int64_t, int> expected = Each(1, kNumTokens, 30);
  for (int64_t i = 0; i < file.num_documents(); ++i) {
    expected.erase(file.Document(i)->begin + 1);  // nothing is before it
  }
  for (int world_size : kWorldSizes) {
    EXPECT_EQ(TrainedTargets(rows, 30, world_size), expected);
  }
}

TEST(TrainingDataTest, AStreamIsMeasuredWithAllOfIt) {
  ASSERT_OK_AND_ASSIGN(const TokenFile file, Text());
  for (int64_t num_tokens : {int64_t{2}, int64_t{100}, kNumTokens}) {
    ASSERT_OK_AND_ASSIGN(const std::shared_ptr<const RowSource> rows,
                         WindowRows::Create(file.Part({0, num_tokens}), kSeq,
                                            LastWindow::kPadded));
    for (int world_size : kWorldSizes) {
      EXPECT_EQ(MeasuredTargets(rows, 30, world_size), Each(2, num_tokens, 1));
    }
  }
}

TEST(TrainingDataTest, OnlyPackedRowsSayWhereDocumentsBegin) {
  ASSERT_OK_AND_ASSIGN(const TokenFile file, Text());
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<const RowSource> windows,
                       WindowRows::Create(file, kSeq, LastWindow::kLeftOut));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<const RowSource> packed,
                       PackedRows::Create(file, kSeq, 1));
  const auto documents = [](const std::shared_ptr<const RowSource>& rows) {
    return TokenBatches::Create(rows, {4, 0, 1}, 1)->Next()->documents;
  };
  EXPECT_THAT(documents(windows), ::testing::Each(IsEmpty()));
  EXPECT_THAT(documents(packed), ::testing::Each(Not(IsEmpty())));
}

}  // namespace
}  // namespace llama
