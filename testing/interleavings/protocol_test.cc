// The cases keep their promises, and planted bugs of training are found.
//
// A checker of the schedule alone could not see those: a rank writes its shard
// in place while another one still computes with it. Here ranks really pass
// fences, or do not, and memory says what they read.
#include <iostream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/interleavings/checker.h"
#include "testing/interleavings/scenarios.h"

namespace fsdp::interleavings {

namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class ProtocolTest : public ::testing::TestWithParam<int> {};

// Also prints how much was explored, which is part of what passing means.
TEST_P(ProtocolTest, KeepsItsPromises) {
  for (const Case& c : AllCases(GetParam())) {
    const CheckResult result = Explore(c.scenario, c.options);
    std::cout << GetParam() << " ranks, " << c.name << ": " << result << "\n"
              << std::flush;
    EXPECT_THAT(result.violation, IsEmpty()) << c.name;
    EXPECT_GT(result.completed, 1) << c.name;
  }
}

INSTANTIATE_TEST_SUITE_P(OfRanks, ProtocolTest, ::testing::Values(2, 3));

// The values show it, or that nothing orders the accesses.
auto IsStaleRead() {
  return ::testing::AnyOf(HasSubstr("data race at common memory"),
                          HasSubstr("with a shard of rank"));
}

CheckResult ResultOf(const Training& training) {
  CheckOptions options;
  options.max_preemptions = 0;
  return Explore(TrainingSteps(training), options);
}

TEST(TrainingTest, AnOptimizerThatWritesWhatAPeerStillReadsIsFound) {
  Training training;
  training.user_unshards = true;
  EXPECT_THAT(ResultOf(training).violation, IsEmpty());
  training.unsharding_opens = true;
  EXPECT_THAT(ResultOf(training).violation, IsStaleRead());
}

// Nothing else waits between the optimizer's writes and the next forward.
TEST(TrainingTest, AForwardThatDoesNotOpenShardsIsFound) {
  Training training;
  constexpr int kSecondOpening = 2;
  training.left_out_fence = kSecondOpening;
  EXPECT_THAT(ResultOf(training).violation, IsStaleRead());
}

TEST(TrainingTest, WithoutReductionsNothingTellsThatPeersHaveRead) {
  Training training;
  training.leaves_out_reductions = true;
  EXPECT_THAT(ResultOf(training).violation, IsStaleRead());
}

TEST(TrainingTest, AnEvaluationThatDoesNotCloseShardsIsFound) {
  Training training;
  training.evaluates = true;
  EXPECT_THAT(ResultOf(training).violation, IsEmpty());
  constexpr int kFirstClosing = 1;
  training.left_out_fence = kFirstClosing;
  EXPECT_THAT(ResultOf(training).violation, IsStaleRead());
}

}  // namespace

}  // namespace fsdp::interleavings
