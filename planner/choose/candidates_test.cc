#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/testing/status_matchers.h"
#include "planner/choose/choose_options.h"

namespace fsdp {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Candidate Of(double seconds, int64_t bytes, int64_t activations = 0) {
  Candidate candidate;
  candidate.units = "root and 3";
  candidate.strategy = "full shard";
  candidate.rests = "memory";
  candidate.seconds = seconds;
  candidate.plan.shards = bytes;
  candidate.activations = activations;
  return candidate;
}

// Returns -1 for none.
int Chosen(const std::vector<Candidate>& candidates, int64_t memory_bytes) {
  return ChooseCandidate(candidates, memory_bytes).value_or(-1);
}

TEST(ChooseCandidateTest, TakesTheFastestThatFits) {
  const std::vector<Candidate> candidates = {Of(1, 100), Of(2, 50), Of(3, 10)};
  EXPECT_EQ(Chosen(candidates, 100), 0);
  EXPECT_EQ(Chosen(candidates, 99), 1);
  EXPECT_EQ(Chosen(candidates, 49), 2);
  // Activations count.
  EXPECT_EQ(Chosen({Of(1, 50, 51), Of(2, 50, 50)}, 100), 1);
}

TEST(ChooseCandidateTest, OfThoseThatAreAsFastTheSmallestThenTheFirst) {
  EXPECT_EQ(Chosen({Of(1, 100), Of(1.019, 90), Of(1.03, 10)}, 1000), 1);
  EXPECT_EQ(Chosen({Of(1.01, 90), Of(1, 90), Of(1, 90)}, 1000), 0);
}

TEST(ChooseCandidateTest, WhatIsRefusedIsNotTaken) {
  EXPECT_EQ(Chosen({}, 1), -1);
  std::vector<Candidate> candidates = {Of(1, 1), Of(2, 2)};
  candidates[0].refused = "no room";
  EXPECT_EQ(Chosen(candidates, 100), 1);
  candidates[1].refused = "no disk";
  EXPECT_THAT(
      ChooseCandidate(candidates, 100),
      StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("no room")));
}

TEST(ChooseCandidateTest, SaysWhatTheSmallestLacks) {
  const int64_t mib = 1 << 20;
  EXPECT_THAT(
      ChooseCandidate({Of(1, 9 * mib), Of(2, 5 * mib, mib), Of(3, 7 * mib)},
                      4 * mib),
      StatusIs(absl::StatusCode::kResourceExhausted,
               AllOf(HasSubstr("none of 3"), HasSubstr("takes 6.00 MiB"),
                     HasSubstr("1.00 of them activations"),
                     HasSubstr("lacks 2.00 MiB (2097152 bytes)"),
                     HasSubstr("Allow more memory"))));
}

TEST(TableOfTest, SaysOfEachWhyItWasNotTaken) {
  const int64_t mib = 1 << 20;
  std::vector<Candidate> candidates = {Of(0.002, 9 * mib), Of(0.001, 3 * mib),
                                       Of(0.001, 4 * mib), Of(0.00101, 3 * mib),
                                       Of(0.003, mib),     Of(0.001, mib)};
  candidates[5].refused = "the host lacks 7 MiB";
  candidates[4].recompute = true;
  candidates[4].prefetch = false;
  const std::string table = TableOf(candidates, 1, 5 * mib);
  EXPECT_THAT(
      table, AllOf(HasSubstr("of 5.00 MiB"), HasSubstr("chosen"),
                   HasSubstr("no faster, 1.00 MiB more"), HasSubstr("the same"),
                   HasSubstr("slower by 200 %"), HasSubstr("lacks 4.00 MiB"),
                   HasSubstr("the host lacks 7 MiB")));
  // They are in this order.
  size_t at = 0;
  for (const char* verdict :
       {"chosen", "the same", "slower by", "lacks 4.00", "the host lacks"}) {
    const size_t found = table.find(verdict, at);
    ASSERT_NE(found, std::string::npos) << verdict << " in\n" << table;
    at = found;
  }
}

TEST(TableOfTest, EndsWithHowManyMoreThereAre) {
  std::vector<Candidate> candidates;
  candidates.reserve(7);
  for (int i = 0; i < 7; ++i) candidates.push_back(Of(1 + i, 1));
  const std::string table = TableOf(candidates, 6, 10, /*max_lines=*/3);
  EXPECT_THAT(table, HasSubstr("and 4 more\n"));
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 1 + 3 + 1);
  EXPECT_THAT(table, HasSubstr("chosen"));
  EXPECT_THAT(TableOf(candidates, 6, 10, 7), Not(HasSubstr("more")));
}

TEST(TableOfTest, WhatMakesNoDifferenceSharesALine) {
  std::vector<Candidate> candidates(5, Of(1, 1));
  candidates[1].strategy = "no shard";
  candidates[2].prefetch = false;
  candidates[3].units = "root alone";
  candidates[4].recompute = true;
  const std::string table = TableOf(candidates, 0, 10);
  EXPECT_THAT(table,
              AllOf(HasSubstr("chosen, as 2 others\n"), HasSubstr("root alone"),
                    Not(HasSubstr("no shard"))));
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 1 + 3);
  candidates[2].activations = 1;
  EXPECT_THAT(TableOf(candidates, 0, 10), HasSubstr("chosen, as 1 other\n"));
}

TEST(TableOfTest, AlsoWhereNothingWasChosen) {
  EXPECT_THAT(TableOf({Of(1, 100 << 20)}, -1, 1 << 20),
              HasSubstr("lacks 99.00 MiB"));
}

}  // namespace
}  // namespace fsdp
