// Runs a fixed batch of simulated trainings: none has a problem, each is the
// same every time, and planted bugs are found.
#include <cstdint>
#include <iostream>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/simulation/mutant.h"
#include "testing/simulation/scenario.h"
#include "testing/simulation/seed_run.h"

namespace fsdp::simulation {
namespace {

constexpr int kSeeds = 450;
constexpr int kSeedsSeenTwice = 25;
constexpr int kGuarded = 200;
constexpr int kPrograms = 100;
constexpr int kSeedsPerMutant = 300;

SeedResult Simulate(uint64_t seed, Mutant mutant = Mutant::kNone) {
  SeedOptions options;
  options.mutant = mutant;
  return RunSeed(DrawScenario(seed), options);
}

class BatchTest : public ::testing::Test {
 protected:
  void SetUp() override { PrepareProcess(); }

  // Runs seeds without a problem, and counts their features.
  void Run(int seeds, Scenario (*draw)(uint64_t seed)) {
    for (uint64_t seed = 0; seed < static_cast<uint64_t>(seeds); ++seed) {
      const SeedResult result = RunSeed(draw(seed), SeedOptions());
      ASSERT_EQ(result.problem, "") << ToString(draw(seed));
      for (const std::string& feature : result.features) ++features_[feature];
    }
  }
  // A fault that never happens tests nothing.
  void ExpectFeature(const std::string& name) {
    EXPECT_GT(features_[name], 0) << name;
  }

 private:
  std::map<std::string, int> features_;
};

TEST_F(BatchTest, TrainingsGiveTheBitsOfPlainLibTorchOrSayWhatHasHappened) {
  Run(kSeeds, [](uint64_t seed) { return DrawScenario(seed); });
  if (HasFatalFailure()) return;
  for (int kind = 0; kind < kNumFaultKinds; ++kind) {
    ExpectFeature(
        absl::StrCat("fault: ", ToString(static_cast<FaultKind>(kind))));
  }
  for (absl::string_view name : absl::StrSplit(
           "ranks 1|ranks 2|ranks 3|ranks 5|ranks 8|bfloat16|accumulation|"
           "accumulation, no sync|common memory|common memory, seen late|"
           "parameters rest|gradients rest|states rest|rests in host memory|"
           "rests in files|CPU tier|little memory|disk moves in parts|saves|"
           "saves beside|small staging|a checkpoint loaded|"
           "another number of ranks|ends well|ends with errors",
           '|')) {
    ExpectFeature(std::string(name));
  }
}

TEST_F(BatchTest, GuardedRunsStopAlikeAndGoOnWithTheBitsOfPlainLibTorch) {
  Run(kGuarded, DrawGuarded);
  if (HasFatalFailure()) return;
  for (const char* name :
       {"fault: signal", "fault: not finite", "fault: finish", "ranks 1",
        "ranks 8", "saves beside", "a checkpoint loaded", "ends well",
        "ends with errors"}) {
    ExpectFeature(name);
  }
}

TEST_F(BatchTest, SeedsThatHaveFoundSomething) {
  for (const uint64_t seed : {1820, 5127}) {
    EXPECT_EQ(Simulate(seed).problem, "") << ToString(DrawScenario(seed));
  }
}

TEST_F(BatchTest, ASeedIsTheSameEveryTime) {
  for (uint64_t seed = 0; seed < kSeedsSeenTwice; ++seed) {
    const SeedResult first = Simulate(seed);
    const SeedResult second = Simulate(seed);
    EXPECT_GT(first.events, 0);
    EXPECT_EQ(first.log_hash, second.log_hash) << seed;
    EXPECT_EQ(first.events, second.events) << seed;
  }
}

TEST_F(BatchTest, ProgramsGiveWhatPlainLibTorchGives) {
  for (uint64_t seed = 0; seed < kPrograms; ++seed) {
    ASSERT_EQ(RunProgramSeed(seed, SeedOptions()).problem, "") << seed;
  }
}

class MutantTest : public BatchTest,
                   public ::testing::WithParamInterface<int> {};

TEST_P(MutantTest, IsFound) {
  for (uint64_t seed = 0; seed < kSeedsPerMutant; ++seed) {
    const SeedResult result = Simulate(seed, static_cast<Mutant>(GetParam()));
    if (result.problem.empty()) continue;
    std::cout << "seed " << seed << ": " << result.problem << std::endl;
    return;
  }
  FAIL() << "none of " << kSeedsPerMutant << " seeds has found it";
}

INSTANTIATE_TEST_SUITE_P(All, MutantTest, ::testing::Range(1, kNumMutants),
                         [](const ::testing::TestParamInfo<int>& info) {
                           std::string name =
                               ToString(static_cast<Mutant>(info.param));
                           for (char& c : name) c = c == ' ' ? '_' : c;
                           return name;
                         });

}  // namespace
}  // namespace fsdp::simulation
