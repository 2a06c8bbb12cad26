#include "checkpoint/tests/covering.h"

#include <cstddef>
#include <set>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::testing::ElementsAre;

TEST(CoveringTest, EachTwoChoicesMeet) {
  const std::vector<int> levels = {5, 1, 3, 6, 2};
  const std::vector<std::vector<int>> rows = CoverPairs(levels);
  EXPECT_LT(rows.size(), 60);  // 30 at least, 180 in all
  for (size_t i = 0; i < levels.size(); ++i) {
    for (size_t j = i + 1; j < levels.size(); ++j) {
      std::set<std::pair<int, int>> met;
      for (const std::vector<int>& row : rows) met.insert({row[i], row[j]});
      EXPECT_EQ(met.size(), levels[i] * levels[j]) << i << " " << j;
    }
  }
}

TEST(CoveringTest, All) {
  EXPECT_THAT(AllOf({2, 1, 2}),
              ElementsAre(ElementsAre(0, 0, 0), ElementsAre(0, 0, 1),
                          ElementsAre(1, 0, 0), ElementsAre(1, 0, 1)));
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
