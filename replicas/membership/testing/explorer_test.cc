#include "replicas/membership/testing/explorer.h"

#include <cstdint>
#include <cstdlib>
#include <iostream>

#include "gtest/gtest.h"

namespace fsdp::replicas::testing {
namespace {

constexpr uint64_t kSeeds = 3000;

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// --test_env=FIRST_SEED=N and --test_env=SEEDS=N explore others.
TEST(ExplorerTest, RunsKeepWhatIsPromisedAndEnd) {
  const uint64_t first = FromEnvironment("FIRST_SEED", 0);
  const uint64_t seeds = FromEnvironment("SEEDS", kSeeds);
  Exploration sum;
  int quiet = 0;
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    const Exploration seen = Explore(seed);
    ASSERT_EQ(seen.finding, "") << "seed " << seed;
    quiet += seen.had_faults ? 0 : 1;
    sum.entries += seen.entries;
    sum.lost += seen.lost;
    sum.foundings += seen.foundings;
    sum.joined += seen.joined;
    sum.evicted += seen.evicted;
    sum.stalls += seen.stalls;
    sum.calls += seen.calls;
  }
  std::cout << seeds << " seeds, " << quiet
            << " without faults: " << sum.entries << " entries, " << sum.lost
            << " of them lost, " << sum.foundings << " founded anew, "
            << sum.joined << " joined, " << sum.evicted << " ranks evicted, "
            << sum.stalls << " stalls, " << sum.calls << " calls\n";
  if (seeds < kSeeds) return;
  EXPECT_GT(quiet, 0);
  EXPECT_GT(sum.lost, 0);
  EXPECT_GT(sum.foundings, 0);
  EXPECT_GT(sum.joined, 0);
  EXPECT_GT(sum.evicted, 0);
  EXPECT_GT(sum.stalls, 0);
}

TEST(ExplorerTest, TheSameSeedIsTheSameRun) {
  const Exploration first = Explore(7);
  const Exploration second = Explore(7);
  EXPECT_EQ(first.entries, second.entries);
  EXPECT_EQ(first.calls, second.calls);
}

}  // namespace
}  // namespace fsdp::replicas::testing
