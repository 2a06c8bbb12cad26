#include "testing/gpt/report/rank_numbers.h"

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "base/status_macros.h"
#include "base/testing/check_that.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "gtest/gtest.h"

namespace gpt {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::CheckThat;

TEST(GatherNumbersTest, EveryRankHasThoseOfAll) {
  for (const int ranks : {1, 2, 3, 5}) {
    std::vector<std::vector<int64_t>> expected;
    expected.reserve(ranks);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      expected.push_back({rank, -10 * rank});
    }
    EXPECT_OK(RunAllRanks(ranks, [&](Communicator& communicator) {
      const std::vector<int64_t>& mine = expected[communicator.rank()];
      const auto all = GatherNumbers(mine, "numbers", communicator);
      FSDP_RETURN_IF_ERROR(all.status());
      return CheckThat(*all, expected, "numbers of all ranks");
    }));
  }
}

}  // namespace
}  // namespace gpt
