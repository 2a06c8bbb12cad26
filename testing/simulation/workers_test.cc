#include "testing/simulation/workers.h"

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/simulation/seed_run.h"

namespace fsdp::simulation {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr int64_t kFirst = 100;
constexpr int64_t kEnd = 140;

// Counts what is taken, by seed, until `last` is.
struct Taken {
  explicit Taken(WorkersOptions options, int64_t last = -1) {
    options.first = kFirst;
    options.take = [&](int64_t seed, const SeedResult& result) {
      ++times[seed];
      results[seed] = result;
      return seed != last;
    };
    RunWorkers(options);
  }

  std::map<int64_t, int> times;
  std::map<int64_t, SeedResult> results;
};

SeedResult ResultOf(int64_t seed) {
  SeedResult result;
  result.features = {"", absl::StrCat("feature ", seed)};
  result.events = seed * 3;
  result.log_hash = uint64_t(seed) << 57;
  // This is more than comes in one piece.
  if (seed % 2 == 1) {
    result.problem =
        absl::StrCat("problem ", seed, "\n", std::string(100'000, '\0'));
  }
  return result;
}

TEST(WorkersTest, EachSeedIsSimulatedOnceAndItsResultTaken) {
  for (const int jobs : {1, 3}) {
    WorkersOptions options;
    options.jobs = jobs;
    options.end = kEnd;
    options.simulate = ResultOf;
    const Taken taken(options);
    ASSERT_THAT(taken.times, SizeIs(kEnd - kFirst));
    for (int64_t seed = kFirst; seed < kEnd; ++seed) {
      EXPECT_EQ(taken.times.at(seed), 1) << seed;
      const SeedResult& result = taken.results.at(seed);
      const SeedResult wanted = ResultOf(seed);
      EXPECT_EQ(result.features, wanted.features);
      EXPECT_EQ(result.events, wanted.events);
      EXPECT_EQ(result.log_hash, wanted.log_hash);
      EXPECT_EQ(result.problem, wanted.problem);
    }
  }
}

TEST(WorkersTest, ACrashIsItsSeedsProblemAndAllOthersAreSimulated) {
  WorkersOptions options;
  options.jobs = 2;
  options.end = kEnd;
  options.simulate = [](int64_t seed) {
    if (seed == 107) std::abort();
    if (seed == 111) _exit(3);
    return SeedResult();
  };
  const Taken taken(options);
  EXPECT_THAT(taken.times, SizeIs(kEnd - kFirst));
  for (const auto& [seed, result] : taken.results) {
    if (seed == 107) {
      EXPECT_THAT(result.problem, HasSubstr("ended by signal 6"));
    } else if (seed == 111) {
      EXPECT_THAT(result.problem, HasSubstr("exits with 3"));
    } else {
      EXPECT_EQ(result.problem, "") << seed;
    }
  }
}

TEST(WorkersTest, ASeedThatDoesNotEndIsAProblem) {
  WorkersOptions options;
  options.end = kFirst + 2;
  options.longest = absl::Milliseconds(1);
  options.simulate = [](int64_t seed) {
    while (seed == kFirst) pause();
    return SeedResult();
  };
  const Taken taken(options);
  EXPECT_THAT(taken.results.at(kFirst).problem, HasSubstr("does not end"));
  EXPECT_THAT(taken.times, SizeIs(2));
}

TEST(WorkersTest, NoSeedBeginsOnceTheCallerHasHadEnough) {
  WorkersOptions options;
  options.jobs = 2;
  options.simulate = ResultOf;
  const Taken taken(options, /*last=*/kFirst + 5);
  EXPECT_GT(taken.times.size(), 5);
  for (int64_t seed = kFirst; seed <= kFirst + 5; ++seed) {
    EXPECT_EQ(taken.times.at(seed), 1) << seed;
  }
}

TEST(WorkersTest, NoSeedBeginsWhenTheTimeHasCome) {
  WorkersOptions options;
  options.until = absl::InfinitePast();
  options.simulate = ResultOf;
  EXPECT_THAT(Taken(options).times, SizeIs(0));
}

}  // namespace
}  // namespace fsdp::simulation
