// A checker of the schedule alone could not see this bug: a rank writes its
// shard in place while another one still computes with it. Here ranks really
// pass fences, or do not, and memory says what they read.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/interleavings/checker.h"
#include "testing/interleavings/scenarios.h"

namespace fsdp::interleavings {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// The values show it, or that nothing orders the accesses.
auto IsStaleRead() {
  return AnyOf(HasSubstr("data race at common memory"),
               HasSubstr("with a shard of rank"));
}

CheckResult ResultOf(const Training& training) {
  CheckOptions options;
  options.max_preemptions = 0;
  const CheckResult result = Explore(TrainingSteps(training), options);
  return result;
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
