#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "examples/llama/data/window_rows.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kLargest = int64_t{1} << 62;

std::vector<int64_t> All(int64_t size, uint64_t seed) {
  const Permutation permutation(size, seed);
  std::vector<int64_t> values;
  for (int64_t i = 0; i < size; ++i) values.push_back(permutation(i));
  return values;
}

// Returns how far counts are from all being equal: by chance about the number
// of cells, and hardly ever more than 1.5 times that for these numbers of
// cells.
double ChiSquare(const std::map<std::pair<int64_t, int64_t>, int>& counts,
                 int cells, int total) {
  const double expected = static_cast<double>(total) / cells;
  double sum = (cells - static_cast<int>(counts.size())) * expected;
  for (const auto& [cell, count] : counts) {
    sum += (count - expected) * (count - expected) / expected;
  }
  return sum;
}

TEST(PermutationTest, HasEachValueOnce) {
  std::vector<int64_t> sizes = {255, 256, 257, 1021, 4095, 4096, 4097, 10007};
  for (int64_t size = 1; size <= 70; ++size) sizes.push_back(size);
  for (int64_t size : sizes) {
    for (uint64_t seed : {0, 1, 99}) {
      const std::vector<int64_t> values = All(size, seed);
      const std::set<int64_t> distinct(values.begin(), values.end());
      EXPECT_EQ(distinct.size(), size);
      EXPECT_EQ(*distinct.begin(), 0);
      EXPECT_EQ(*distinct.rbegin(), size - 1);
    }
  }
}

// Another program computed these, with which earlier checkpoints go on.
TEST(PermutationTest, IsWhatItHasAlwaysBeen) {
  EXPECT_THAT(All(11, 42), ElementsAre(10, 0, 6, 5, 4, 2, 7, 3, 1, 9, 8));
  const Permutation large(1000000000000, 1);
  EXPECT_EQ(large(0), 99093225364);
  EXPECT_EQ(large(1), 91979019719);
  EXPECT_EQ(large(999999999999), 988403898570);
  const Permutation largest(kLargest, 7);
  EXPECT_EQ(largest(0), 1092590721977327156);
  EXPECT_EQ(largest(1), 2720665911475575978);
  EXPECT_EQ(largest(kLargest - 1), 3426793995687316288);
  EXPECT_EQ(MixSeeds(0, 0), 0x48218226ff3cd4bf);
  EXPECT_EQ(MixSeeds(1, 2), 0x81a5c1377856b73);
}

// Tests all 24 orders of four, and where two values of small sizes end up.
TEST(PermutationTest, SeedsChooseAmongAllOrdersAlike) {
  constexpr int kSeeds = 24000;
  std::map<std::vector<int64_t>, int> orders;
  for (int seed = 0; seed < kSeeds; ++seed) ++orders[All(4, seed)];
  EXPECT_EQ(orders.size(), 24);
  for (const auto& [order, count] : orders) {
    EXPECT_NEAR(count, kSeeds / 24, 200) << ::testing::PrintToString(order);
  }
  for (int64_t size : {3, 5, 7, 13}) {
    std::map<std::pair<int64_t, int64_t>, int> pairs;
    for (int seed = 0; seed < kSeeds; ++seed) {
      const Permutation permutation(size, seed);
      ++pairs[{permutation(0), permutation(size - 1)}];
    }
    const int cells = size * (size - 1);
    EXPECT_LT(ChiSquare(pairs, cells, kSeeds), 1.5 * cells + 15) << size;
  }
}

// In one order, places and values that are close have nothing to do with each
// other.
TEST(PermutationTest, AnOrderLooksRandom) {
  constexpr int64_t kSize = 100000, kCells = 10;
  const std::vector<int64_t> values = All(kSize, 5);
  std::map<std::pair<int64_t, int64_t>, int> by_place, by_neighbour;
  for (int64_t i = 0; i + 1 < kSize; ++i) {
    const int64_t cell = values[i] * kCells / kSize;
    ++by_place[{i * kCells / kSize, cell}];
    ++by_neighbour[{values[i + 1] * kCells / kSize, cell}];
  }
  EXPECT_LT(ChiSquare(by_place, kCells * kCells, kSize), 150);
  EXPECT_LT(ChiSquare(by_neighbour, kCells * kCells, kSize), 150);
}

TEST(PermutationTest, NumbersOfASeedDiffer) {
  std::set<uint64_t> seeds;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    for (uint64_t number = 0; number < 100; ++number) {
      seeds.insert(MixSeeds(seed, number));
    }
  }
  EXPECT_EQ(seeds.size(), 10000);
}

}  // namespace
}  // namespace llama
