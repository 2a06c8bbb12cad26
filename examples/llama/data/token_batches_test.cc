#include "examples/llama/data/token_batches.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "base/testing/status_matchers.h"
#include "examples/llama/data/window_rows.h"
#include "examples/llama/testing/numbered_rows.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr int kWorldSizes[] = {1, 2, 3, 5, 8};

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

TEST(TokenBatchesTest, EveryEpochHasEachRowOnce) {
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
  }
}

TEST(TokenBatchesTest, AnyNumberOfRanksTrainsTheSameRows) {
  for (int64_t num_rows : {1, 7, 31, 121}) {
    const std::vector<int64_t> order = Order(num_rows, 120, 1, 5, 4);
    for (int world_size : kWorldSizes) {
      EXPECT_EQ(Order(num_rows, 120, world_size, 5, 4), order);
    }
  }
}

TEST(TokenBatchesTest, BatchesOfAnySizeFollowTheSameOrder) {
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
      EXPECT_EQ(unbroken[0].epoch(), 120 * step / 31);
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

TEST(TokenBatchesTest, OtherRanksGoOn) {
  std::vector<TokenBatches> before = AllRanks(31, 24, 3, 5);
  NextOf(before);
  std::vector<TokenBatches> after = AllRanks(31, 24, 2, 5);
  for (TokenBatches& rank : after) ASSERT_OK(rank.Seek(before[0].position()));
  EXPECT_EQ(NextOf(after), NextOf(before));
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

TEST(TokenBatchesTest, AnErrorLeavesThePosition) {
  const auto source = std::make_shared<NumberedRows>(10);
  ASSERT_OK_AND_ASSIGN(TokenBatches batches,
                       TokenBatches::Create(source, {4, 0, 1}, 5));
  ASSERT_OK(batches.Next());
  source->set_fails(true);
  EXPECT_THAT(batches.Next(),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("damaged")));
  EXPECT_EQ(batches.position(), 4);
}

TEST(TokenBatchesTest, RanksShareEqually) {
  EXPECT_THAT(
      TokenBatches::Create(std::make_shared<NumberedRows>(10), {4, 0, 3}, 5),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("4 rows")));
}

}  // namespace
}  // namespace llama
