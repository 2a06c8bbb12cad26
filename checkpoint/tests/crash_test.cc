// Runs that die, or lose power, at every call that changes the disk: what there
// is afterwards is the checkpoint before or the new one, to the bit.
#include <cstdint>
#include <iostream>
#include <map>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/check_that.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/commit/save_layout.h"
#include "checkpoint/files/testing/forwarding_file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/run/run.h"
#include "checkpoint/tests/sharded_training.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/testing/toy_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::testing::CheckThat;
using ::fsdp::testing::Unowned;

constexpr char kRoot[] = "/run";
constexpr int kSeeds = 3;

// What a run does that may die: after a save of step 1, another one.
struct Scenario {
  int ranks = 1;
  bool async = false;
  bool replaces = false;  // step 1; otherwise it is step 2
  std::optional<int64_t> keep_last = std::nullopt;
  // By manifest: on storage that renames nothing.
  CommitBy commit_by = CommitBy::kRename;
};

// How runs see the disk.
class Storage {
 public:
  Storage(const Scenario& scenario, SimulatedFileSystem& disk)
      : by_rename_(scenario.commit_by == CommitBy::kRename),
        disk_(disk),
        mount_(disk) {}
  FileSystem& files() {
    if (by_rename_) return disk_;
    return mount_;
  }

 private:
  const bool by_rename_;
  SimulatedFileSystem& disk_;
  ObjectStoreMount mount_;
};

constexpr int kVersions = 3;  // of values, by steps taken; 0: none

CheckpointerOptions OptionsOf(const Scenario& scenario, FileSystem& files) {
  CheckpointerOptions options;
  options.files = &files;
  options.overwrite = scenario.replaces;
  options.keep_last = scenario.keep_last;
  options.timeout = absl::Seconds(20);
  options.staging_bytes = 1000;  // less than there is
  options.commit_by = scenario.commit_by;
  if (options.commit_by == CommitBy::kManifest) {
    options.layout = SaveLayout::kPerRank;
  }
  return options;
}

TrainingSetup Setup() {
  TrainingSetup setup;
  setup.optimizer = OptimizerKind::kSgd;  // fewer files
  setup.averages = false;
  return setup;
}

// The values that a checkpoint after so many steps has.
std::map<int, Values> ExpectedOf(int ranks) {
  std::map<int, Values> expected;
  EXPECT_OK(RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const auto training,
                          ShardedTraining::Make(world, Setup(), /*seed=*/1));
    for (int steps = 1; steps < kVersions; ++steps) {
      FSDP_RETURN_IF_ERROR(training->Step(steps).status());
      FSDP_ASSIGN_OR_RETURN(const Values values, training->Gather());
      if (world.rank() == 0) expected[steps] = values;
    }
    return absl::OkStatus();
  }));
  return expected;
}

absl::Status SaveOnce(Checkpointer& checkpoints, ShardedTraining& training,
                      const Scenario& scenario) {
  const int64_t step = scenario.replaces ? 1 : 2;
  if (!scenario.async) return checkpoints.Save(step, training.AsRun());
  FSDP_RETURN_IF_ERROR(checkpoints.SaveAsync(step, training.AsRun()));
  FSDP_RETURN_IF_ERROR(training.Step(kVersions).status());
  return checkpoints.Wait();
}

// Dies at change number `call` of the second save.
absl::Status RunAndDie(Communicator& world, const Scenario& scenario,
                       FaultyFileSystem& files, int64_t call) {
  FSDP_ASSIGN_OR_RETURN(const auto training,
                        ShardedTraining::Make(world, Setup(), /*seed=*/1));
  FSDP_ASSIGN_OR_RETURN(
      const auto checkpoints,
      Checkpointer::Open(kRoot, Unowned(world), OptionsOf(scenario, files)));
  FSDP_RETURN_IF_ERROR(training->Step(1).status());
  FSDP_RETURN_IF_ERROR(checkpoints->Save(1, training->AsRun()));
  FSDP_RETURN_IF_ERROR(training->Step(2).status());
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  FSDP_RETURN_IF_ERROR(comm::Barrier(world, "saved", deadline));
  if (world.rank() == 0) files.StopAtCall(files.calls() + call);
  FSDP_RETURN_IF_ERROR(comm::Barrier(world, "armed", deadline));
  return SaveOnce(*checkpoints, *training, scenario);
}

// How many steps were taken when what is loaded was saved; and the run goes on.
absl::StatusOr<int> LoadAndGoOn(Communicator& world, const Scenario& scenario,
                                FileSystem& files,
                                const std::map<int, Values>& expected) {
  FSDP_ASSIGN_OR_RETURN(const auto training,
                        ShardedTraining::Make(world, Setup(), /*seed=*/5));
  FSDP_ASSIGN_OR_RETURN(
      const auto checkpoints,
      Checkpointer::Open(kRoot, Unowned(world), OptionsOf(scenario, files)));
  TrainingRun run = training->AsRun();
  FSDP_ASSIGN_OR_RETURN(const std::optional<int64_t> step,
                        checkpoints->LoadLatest(run));
  FSDP_ASSIGN_OR_RETURN(const Values values, training->Gather());
  int found = 0;
  absl::Status same;
  if (world.rank() == 0) {
    for (const auto& [steps, wanted] : expected) {
      same = CheckSameBits(values, wanted);
      if (same.ok()) found = steps;
      if (same.ok()) break;
    }
    const int64_t saved_as = scenario.replaces ? 1 : found;
    if (same.ok()) {
      same = CheckThat(step, ::testing::Optional(saved_as),
                       "step whose values are loaded");
    }
  }
  FSDP_RETURN_IF_ERROR(
      comm::Agree(world, same, "same", absl::Now() + absl::Seconds(20)));
  // Also the step at which the run has died.
  FSDP_RETURN_IF_ERROR(checkpoints->Save(*step + 1, training->AsRun()));
  return found;
}

// True where the run was over before it could die.
bool DieAndCheck(const Scenario& scenario, int64_t call,
                 std::optional<int> power_seed,
                 const std::map<int, Values>& expected) {
  SimulatedFileSystem disk;
  Storage before(scenario, disk);
  FaultyFileSystem files(before.files());
  const auto statuses = RunRanks(scenario.ranks, [&](Communicator& world) {
    return RunAndDie(world, scenario, files, call);
  });
  bool all_ok = true;
  bool one_ok = false;
  for (const absl::Status& status : statuses) {
    all_ok = all_ok && status.ok();
    one_ok = one_ok || status.ok();
  }
  if (power_seed.has_value()) {
    disk.LosePower(*power_seed);
  } else {
    disk.KillProcess();
  }
  int found = 0;
  Storage after(scenario, disk);
  EXPECT_OK(RunAllRanks(scenario.ranks, [&](Communicator& world) {
    const absl::StatusOr<int> steps =
        LoadAndGoOn(world, scenario, after.files(), expected);
    if (steps.ok() && world.rank() == 0) found = *steps;
    return steps.status();
  }));
  EXPECT_GE(found, one_ok ? 2 : 1);
  return all_ok;
}

// At every call; with each number of seeds of a loss of power, or a kill.
void DieEverywhere(const Scenario& scenario) {
  const std::map<int, Values> expected = ExpectedOf(scenario.ranks);
  int64_t call = 0;
  for (bool over = false; !over; ++call) {
    over = true;
    for (int seed = -1; seed < kSeeds; ++seed) {
      SCOPED_TRACE(absl::StrCat("call ", call, ", seed ", seed));
      const std::optional<int> power_seed =
          seed < 0 ? std::nullopt : std::optional<int>(seed);
      over &= DieAndCheck(scenario, call, power_seed, expected);
      if (::testing::Test::HasFailure()) return;
    }
  }
  std::cout << "K = " << call - 1 << " calls that change the disk, "
            << scenario.ranks << " ranks" << (scenario.async ? ", async" : "")
            << (scenario.replaces ? ", replacing" : "")
            << (scenario.commit_by == CommitBy::kManifest ? ", by manifest"
                                                          : "")
            << std::endl;
}

void DieOnOneOrTwoRanks(Scenario scenario) {
  for (scenario.ranks = 1; scenario.ranks <= 2; ++scenario.ranks) {
    DieEverywhere(scenario);
  }
}

TEST(CheckpointCrashTest, Save) { DieOnOneOrTwoRanks({}); }

TEST(CheckpointCrashTest, SaveAsync) {
  Scenario scenario;
  scenario.async = true;
  DieOnOneOrTwoRanks(scenario);
}

TEST(CheckpointCrashTest, TheOneBeforeIsRemoved) {
  Scenario scenario;
  scenario.keep_last = 1;
  DieOnOneOrTwoRanks(scenario);
}

TEST(CheckpointCrashTest, ByManifest) {
  Scenario scenario;
  scenario.keep_last = 1;
  scenario.commit_by = CommitBy::kManifest;
  DieOnOneOrTwoRanks(scenario);
  scenario.async = true;
  DieOnOneOrTwoRanks(scenario);
}

TEST(CheckpointCrashTest, TheOneBeforeIsReplaced) {
  for (const bool async : {false, true}) {
    Scenario scenario;
    scenario.ranks = 1;
    scenario.async = async;
    scenario.replaces = true;
    DieEverywhere(scenario);
  }
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
