#include <cstdint>
#include <memory>
#include <vector>

#include "base/testing/status_matchers.h"
#include "examples/llama/data/token_batches.h"
#include "examples/llama/data/window_rows.h"
#include "examples/llama/testing/numbered_rows.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::Each;
using ::testing::HasSubstr;

std::vector<EvaluationBatches> AllRanks(int64_t num_rows, int64_t batch_rows,
                                        int world_size) {
  const auto source = std::make_shared<NumberedRows>(num_rows);
  std::vector<EvaluationBatches> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    ranks.push_back(
        EvaluationBatches::Create(source, {batch_rows, rank, world_size})
            .value());
  }
  return ranks;
}

TEST(EvaluationBatchesTest, EveryRowComesOnceInOrderOnAnyNumberOfRanks) {
  for (int world_size : {1, 2, 3, 5, 8}) {
    for (int64_t num_rows : {1, 7, 119, 120, 121, 240, 257}) {
      const std::vector<EvaluationBatches> ranks =
          AllRanks(num_rows, 120, world_size);
      std::vector<int64_t> rows;
      for (int64_t i = 0; i < ranks[0].num_batches(); ++i) {
        for (const EvaluationBatches& rank : ranks) {
          EXPECT_EQ(rank.num_batches(), ranks[0].num_batches());
          ASSERT_OK_AND_ASSIGN(const Batch batch, rank.Read(i));
          EXPECT_EQ(batch.tokens.size(0), 120 / world_size);
          for (int64_t row : NumbersOf(batch.tokens)) rows.push_back(row);
        }
      }
      ASSERT_GE(rows.size(), num_rows);
      EXPECT_LT(rows.size(), num_rows + 120);
      for (int64_t i = 0; i < static_cast<int64_t>(rows.size()); ++i) {
        EXPECT_EQ(rows[i], i < num_rows ? i : -1);
      }
    }
  }
}

TEST(EvaluationBatchesTest, PaddingHasNoTargets) {
  const std::vector<EvaluationBatches> ranks = AllRanks(1, 2, 2);
  ASSERT_EQ(ranks[1].num_batches(), 1);
  EXPECT_THAT(ValuesOf(ranks[1].Read(0)->targets), Each(kNoTarget));
}

TEST(EvaluationBatchesTest, RanksShareEqually) {
  EXPECT_THAT(
      EvaluationBatches::Create(std::make_shared<NumberedRows>(10), {4, 0, 3}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("4 rows")));
}

}  // namespace
}  // namespace llama
