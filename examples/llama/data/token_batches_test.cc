#include "examples/llama/data/token_batches.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "examples/llama/testing/numbered_rows.h"

namespace llama {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int kWorldSizes[] = {1, 2, 3, 5, 8};

TEST(BatchTest, HasTheRowsThatAreAskedForAndPadding) {
  ASSERT_OK_AND_ASSIGN(const Batch batch,
                       ReadBatch(NumberedRows(4), {3, 0, 4}));
  EXPECT_EQ(batch.tokens.sizes(), (at::IntArrayRef{3, 2}));
  EXPECT_EQ(batch.targets.sizes(), (at::IntArrayRef{3, 2}));
  EXPECT_EQ(batch.tokens.scalar_type(), at::kLong);
  EXPECT_EQ(batch.targets.scalar_type(), at::kLong);
  EXPECT_THAT(ValuesOf(batch.tokens),
              ElementsAre(31, 32, 1, 2, kPadding, kPadding));
  EXPECT_THAT(ValuesOf(batch.targets),
              ElementsAre(32, 33, 2, 3, kNoTarget, kNoTarget));
  EXPECT_THAT(batch.starts, ElementsAre(0, 1, 2, 4));
  EXPECT_THAT(ReadBatch(NumberedRows(4), {2, 0, 4})->starts, IsEmpty());
}

TEST(BatchTest, RanksShareRowsEqually) {
  const auto source = std::make_shared<NumberedRows>(10);
  EXPECT_OK(TokenBatches::Create(source, {1, 0, 1}, 5));
  EXPECT_OK(TokenBatches::Create(source, {6, 2, 3}, 5));
  for (const BatchShare& share :
       {BatchShare{0, 0, 1}, BatchShare{-2, 0, 2}, BatchShare{5, 0, 2},
        BatchShare{1, 0, 2}, BatchShare{6, 3, 3}, BatchShare{6, -1, 3},
        BatchShare{6, 0, 0}}) {
    EXPECT_THAT(TokenBatches::Create(source, share, 5),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr(absl::StrCat(share.rows, " rows"))));
  }
  const BatchShare share = {6, 2, 3};
  EXPECT_EQ(share.own_rows(), 2);
  EXPECT_EQ(share.first_row(), 4);
}

std::vector<TokenBatches> AllRanks(int64_t num_rows, int64_t batch_rows,
                                   int world_size, uint64_t seed) {
  const auto source = std::make_shared<NumberedRows>(num_rows);
  std::vector<TokenBatches> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    ranks.push_back(
        TokenBatches::Create(source, {batch_rows, rank, world_size}, seed)
            .value());
  }
  return ranks;
}

// Returns the rows of the next batch, rank after rank.
std::vector<int64_t> NextOf(std::vector<TokenBatches>& ranks) {
  std::vector<int64_t> rows;
  for (TokenBatches& rank : ranks) {
    const absl::StatusOr<Batch> batch = rank.Next();
    EXPECT_OK(batch);
    for (int64_t row : NumbersOf(batch->tokens)) rows.push_back(row);
  }
  return rows;
}

// Returns rows in the order in which a run has them.
std::vector<int64_t> Order(int64_t num_rows, int64_t batch_rows, int world_size,
                           uint64_t seed, int64_t num_batches) {
  std::vector<TokenBatches> ranks =
      AllRanks(num_rows, batch_rows, world_size, seed);
  std::vector<int64_t> order;
  for (int64_t i = 0; i < num_batches; ++i) {
    const std::vector<int64_t> rows = NextOf(ranks);
    EXPECT_THAT(rows, SizeIs(batch_rows));
    order.insert(order.end(), rows.begin(), rows.end());
  }
  return order;
}

TEST(TokenBatchesTest, EveryEpochHasEachRowOnceOnAnyNumberOfRanks) {
  for (int64_t num_rows : {1, 2, 3, 7, 16, 31, 100, 121}) {
    std::vector<int64_t> all(num_rows);
    std::iota(all.begin(), all.end(), 0);
    const std::vector<int64_t> order = Order(num_rows, 120, 1, 5, 4);
    for (int64_t begin = 0; begin + num_rows <= 480; begin += num_rows) {
      std::vector<int64_t> epoch(order.begin() + begin,
                                 order.begin() + begin + num_rows);
      std::sort(epoch.begin(), epoch.end());
      EXPECT_EQ(epoch, all) << "from " << begin;
    }
    for (int world_size : kWorldSizes) {
      EXPECT_EQ(Order(num_rows, 120, world_size, 5, 4), order);
    }
  }
  EXPECT_EQ(Order(31, 120, 3, 5, 1), Order(31, 8, 2, 5, 15));
}

TEST(TokenBatchesTest, EpochsAndSeedsShuffleAnew) {
  const std::vector<int64_t> order = Order(60, 60, 1, 5, 3);
  const auto epoch = [&order](int i) {
    return std::vector<int64_t>(order.begin() + 60 * i,
                                order.begin() + 60 * (i + 1));
  };
  EXPECT_FALSE(std::is_sorted(order.begin(), order.begin() + 60));
  EXPECT_NE(epoch(0), epoch(1));
  EXPECT_NE(epoch(1), epoch(2));
  EXPECT_NE(epoch(0), epoch(2));
  EXPECT_NE(Order(60, 60, 1, 6, 1), epoch(0));
}

TEST(TokenBatchesTest, GoesOnFromEveryPosition) {
  for (int world_size : kWorldSizes) {
    std::vector<TokenBatches> unbroken = AllRanks(31, 120, world_size, 5);
    for (int step = 0; step < 6; ++step) {
      EXPECT_EQ(unbroken[0].position(), 120 * step);
      std::vector<TokenBatches> resumed = AllRanks(31, 120, world_size, 5);
      for (TokenBatches& rank : resumed) {
        ASSERT_OK(rank.Seek(unbroken[0].position()));
      }
      const std::vector<int64_t> next = NextOf(unbroken);
      EXPECT_EQ(NextOf(resumed), next);
      EXPECT_EQ(resumed[0].position(), unbroken[0].position());
    }
  }
}

TEST(TokenBatchesTest, PositionsHaveLimits) {
  std::vector<TokenBatches> ranks = AllRanks(31, 24, 1, 5);
  ASSERT_OK(ranks[0].Seek(int64_t{1} << 62));
  EXPECT_THAT(NextOf(ranks), SizeIs(24));
  for (int64_t position : {int64_t{-1}, (int64_t{1} << 62) + 1}) {
    EXPECT_THAT(ranks[0].Seek(position),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr(absl::StrCat(position))));
  }
  EXPECT_EQ(ranks[0].position(), (int64_t{1} << 62) + 24);
}

TEST(TokenBatchesTest, AnErrorOfTheSourceLeavesThePosition) {
  const auto source = std::make_shared<NumberedRows>(10);
  ASSERT_OK_AND_ASSIGN(TokenBatches batches,
                       TokenBatches::Create(source, {4, 0, 1}, 5));
  ASSERT_OK(batches.Next());
  source->set_fails(true);
  EXPECT_THAT(batches.Next(),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("damaged")));
  EXPECT_EQ(batches.position(), 4);
}

TEST(EvaluationBatchesTest, EveryRowComesOnceInOrderOnAnyNumberOfRanks) {
  for (int world_size : kWorldSizes) {
    for (int64_t num_rows : {1, 7, 119, 120, 121, 240, 257}) {
      const auto source = std::make_shared<NumberedRows>(num_rows);
      std::vector<EvaluationBatches> ranks;
      for (int rank = 0; rank < world_size; ++rank) {
        ranks.push_back({source, {120, rank, world_size}});
      }
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

}  // namespace
}  // namespace llama
