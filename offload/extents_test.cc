#include "offload/extents.h"

#include <algorithm>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace fsdp::offload {
namespace {

TEST(ExtentsTest, TakesTheFirstThatIsLargeEnough) {
  Extents extents(10);
  EXPECT_EQ(extents.Take(3), 0);
  EXPECT_EQ(extents.Take(4), 3);
  EXPECT_EQ(extents.Take(4), std::nullopt);
  extents.Give(0, 3);
  EXPECT_EQ(extents.LargestFree(), 3);
  EXPECT_EQ(extents.Take(2), 0);
  EXPECT_EQ(extents.Take(2), 7);
  EXPECT_EQ(extents.used(), 8);
}

TEST(ExtentsTest, JoinsWhatIsGivenBack) {
  Extents extents(9);
  for (const int64_t start : {0, 3, 6}) EXPECT_EQ(extents.Take(3), start);
  extents.Give(0, 3);
  extents.Give(6, 3);
  extents.Give(3, 3);
  EXPECT_EQ(extents.used(), 0);
  EXPECT_EQ(extents.peak_used(), 9);
  EXPECT_EQ(extents.Take(9), 0);
}

TEST(ExtentsTest, NothingTakesNoSpace) {
  Extents extents(0);
  EXPECT_EQ(extents.Take(0), 0);
  EXPECT_EQ(extents.Take(1), std::nullopt);
  extents.Give(0, 0);
  EXPECT_EQ(extents.LargestFree(), 0);
}

TEST(ExtentsTest, TakesWhereItIsTold) {
  Extents extents(10);
  EXPECT_TRUE(extents.TakeAt(4, 3));
  EXPECT_FALSE(extents.TakeAt(6, 1));
  EXPECT_FALSE(extents.TakeAt(3, 2));
  EXPECT_FALSE(extents.TakeAt(8, 3));
  EXPECT_FALSE(extents.TakeAt(-1, 1));
  EXPECT_TRUE(extents.TakeAt(7, 3));
  EXPECT_EQ(extents.Take(4), 0);
  EXPECT_EQ(extents.LargestFree(), 0);
}

// Compares with an array of bytes.
TEST(ExtentsTest, RandomPiecesNeverOverlap) {
  constexpr int64_t kCapacity = 97;
  Extents extents(kCapacity);
  std::vector<bool> taken(kCapacity);
  std::vector<std::pair<int64_t, int64_t>> pieces;
  std::mt19937 random(1);
  for (int step = 0; step < 5000; ++step) {
    if (random() % 2 == 0 && !pieces.empty()) {
      std::swap(pieces[random() % pieces.size()], pieces.back());
      const auto [start, bytes] = pieces.back();
      pieces.pop_back();
      extents.Give(start, bytes);
      std::fill_n(taken.begin() + start, bytes, false);
    } else {
      const auto bytes = static_cast<int64_t>(1 + random() % 23);
      const std::optional<int64_t> start = extents.Take(bytes);
      const auto free = std::search_n(taken.begin(), taken.end(), bytes, false);
      ASSERT_EQ(start.has_value(), free != taken.end());
      if (!start.has_value()) continue;
      ASSERT_EQ(*start, free - taken.begin());
      std::fill_n(free, bytes, true);
      pieces.push_back({*start, bytes});
    }
    ASSERT_EQ(extents.used(), std::count(taken.begin(), taken.end(), true));
  }
}

}  // namespace
}  // namespace fsdp::offload
