// Runs that die, or lose power, at every call that changes the disk: what there
// is afterwards is the checkpoint before or the new one, to the bit.

#include <cerrno>
#include <cstdint>
#include <iostream>
#include <map>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/files/testing/forwarding_file_system.h"
#include "base/files/testing/simulated_file_system.h"
#include "base/testing/check_that.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/commit/save_layout.h"
#include "checkpoint/run/run.h"
#include "checkpoint/tests/sharded_training.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/testing/toy_model.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::testing::FaultyFileSystem;
using ::fsdp::testing::ObjectStoreMount;
using ::fsdp::testing::SimulatedFileSystem;
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
                          ShardedTraining::Make(world, Setup()));
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
                        ShardedTraining::Make(world, Setup()));
  FSDP_ASSIGN_OR_RETURN(
      const auto checkpoints,
      Checkpointer::Open(kRoot, Unowned(world), OptionsOf(scenario, files)));
  FSDP_RETURN_IF_ERROR(training->Step(1).status());
  FSDP_RETURN_IF_ERROR(checkpoints->Save(1, training->AsRun()));
  FSDP_RETURN_IF_ERROR(training->Step(2).status());
  FSDP_RETURN_IF_ERROR(Meet(world));
  if (world.rank() == 0) files.StopAtCall(files.calls() + call);
  FSDP_RETURN_IF_ERROR(Meet(world));
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
      same = CheckEqual(values, wanted);
      if (same.ok()) found = steps;
      if (same.ok()) break;
    }
    const int64_t saved_as = scenario.replaces ? 1 : found;
    if (same.ok()) {
      same = ::fsdp::testing::CheckThat(step, ::testing::Optional(saved_as),
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

// Disks that are full, broken or read-only at any call: all ranks say so, what
// was saved before is there, and the next save works once the fault is gone.

struct Fault {
  int error = 0;
  absl::StatusCode code;
  bool for_good = false;
};

constexpr Fault kFaults[] = {
    {ENOSPC, absl::StatusCode::kResourceExhausted, false},
    {EIO, absl::StatusCode::kUnavailable, true},
    {EROFS, absl::StatusCode::kPermissionDenied, true},
    {EIO, absl::StatusCode::kUnavailable, false},
};

// What the ranks of one run have in common.
class FaultyRun {
 public:
  FaultyRun(const Scenario& scenario, const Fault& fault, int64_t call)
      : scenario_(scenario), fault_(fault), call_(call), files_(disk_) {}

  absl::Status Run(Communicator& world) {
    FSDP_ASSIGN_OR_RETURN(const auto training,
                          ShardedTraining::Make(world, Setup()));
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints,
                          Checkpointer::Open(kRoot, Unowned(world),
                                             OptionsOf(scenario_, files_)));
    FSDP_RETURN_IF_ERROR(training->Step(1).status());
    FSDP_RETURN_IF_ERROR(checkpoints->Save(1, training->AsRun()));
    FSDP_ASSIGN_OR_RETURN(const Values before, training->Gather());
    FSDP_RETURN_IF_ERROR(training->Step(2).status());
    FSDP_ASSIGN_OR_RETURN(const Values after, training->Gather());
    FSDP_RETURN_IF_ERROR(Arm(world, files_.calls() + call_));
    const int64_t step = scenario_.replaces ? 1 : 2;
    const absl::Status failed = Save(*checkpoints, *training, step);
    FSDP_RETURN_IF_ERROR(Disarm(world));
    FSDP_RETURN_IF_ERROR(CheckError(world, failed));
    const bool is_saved = absl::StrContains(failed.message(), "is saved, but");
    if (failed.ok() || is_saved) {
      return CheckLatest(world, *checkpoints, Setup(), step, after);
    }
    const bool may_be = absl::StrContains(failed.message(), "may be saved");
    const absl::Status old =
        CheckLatest(world, *checkpoints, Setup(), 1, before);
    if (!old.ok() && may_be) {
      FSDP_RETURN_IF_ERROR(
          CheckLatest(world, *checkpoints, Setup(), step, after));
    } else {
      FSDP_RETURN_IF_ERROR(old);
    }
    // The same step again where nothing of it is left.
    if (!fault_.for_good) {
      FSDP_RETURN_IF_ERROR(Save(*checkpoints, *training, step));
      FSDP_RETURN_IF_ERROR(
          CheckLatest(world, *checkpoints, Setup(), step, after));
    }
    FSDP_RETURN_IF_ERROR(Save(*checkpoints, *training, 3));
    return CheckLatest(world, *checkpoints, Setup(), 3, after);
  }

  // The save came to its end before the fault.
  bool was_over() const { return was_over_; }
  // The fault was one that a save can do without.
  bool did_not_matter() const { return did_not_matter_; }

 private:
  absl::Status Arm(Communicator& world, int64_t call) {
    FSDP_RETURN_IF_ERROR(Meet(world));
    if (world.rank() == 0) {
      files_.FailCall(call, fault_.error, fault_.for_good);
      armed_at_ = call;
    }
    return Meet(world);
  }
  absl::Status Disarm(Communicator& world) {
    FSDP_RETURN_IF_ERROR(Meet(world));
    if (world.rank() == 0) {
      was_over_ = files_.calls() <= armed_at_;
      files_.FailCall(/*call=*/-1, /*error=*/0, /*for_good=*/false);
    }
    return Meet(world);
  }

  absl::Status Save(Checkpointer& checkpoints, ShardedTraining& training,
                    int64_t step) {
    if (!scenario_.async) return checkpoints.Save(step, training.AsRun());
    FSDP_RETURN_IF_ERROR(checkpoints.SaveAsync(step, training.AsRun()));
    return checkpoints.Wait();
  }

  // All ranks have the same, which names the file and what to do.
  absl::Status CheckError(Communicator& world, const absl::Status& failed) {
    FSDP_RETURN_IF_ERROR(comm::CheckSame(world, failed.ToString(), "errors",
                                         absl::Now() + absl::Seconds(20)));
    if (failed.ok()) {
      if (world.rank() == 0) did_not_matter_ = !was_over_;
      return absl::OkStatus();
    }
    const bool names = absl::StrContains(failed.message(), kRoot);
    if (failed.code() == fault_.code && names && comm::IsAgreed(failed)) {
      return absl::OkStatus();
    }
    return absl::InternalError(
        absl::StrCat("the error was ", failed.ToString()));
  }

  const Scenario scenario_;
  const Fault fault_;
  const int64_t call_;
  SimulatedFileSystem disk_;
  FaultyFileSystem files_;
  int64_t armed_at_ = 0;  // rank 0 alone writes these, between meetings
  bool was_over_ = false;
  bool did_not_matter_ = false;
};

void FailEverywhere(const Scenario& scenario) {
  int unimportant = 0;
  for (const Fault& fault : kFaults) {
    for (int64_t call = 0;; ++call) {
      SCOPED_TRACE(absl::StrCat("errno ", fault.error, " at call ", call,
                                fault.for_good ? " and after it" : ""));
      FaultyRun run(scenario, fault, call);
      EXPECT_OK(RunAllRanks(
          scenario.ranks, [&](Communicator& world) { return run.Run(world); }));
      if (::testing::Test::HasFailure()) return;
      unimportant += run.did_not_matter();
      if (run.was_over()) break;
    }
  }
  std::cout << unimportant << " faults were none of the save's" << std::endl;
}

TEST(DiskFaultsTest, Save) {
  for (const int ranks : {1, 2}) {
    Scenario scenario;
    scenario.ranks = ranks;
    FailEverywhere(scenario);
  }
}

TEST(DiskFaultsTest, SaveAsync) {
  Scenario scenario;
  scenario.ranks = 2;
  scenario.async = true;
  FailEverywhere(scenario);
}

TEST(DiskFaultsTest, Replace) {
  Scenario scenario;
  scenario.replaces = true;
  FailEverywhere(scenario);
}

// A folder that cannot be made or claimed: then all ranks are without.
TEST(DiskFaultsTest, Open) {
  for (const Fault& fault : kFaults) {
    for (int64_t call = 0;; ++call) {
      SCOPED_TRACE(absl::StrCat("errno ", fault.error, " at call ", call));
      SimulatedFileSystem disk;
      FaultyFileSystem files(disk);
      files.FailCall(call, fault.error, fault.for_good);
      const auto open = [&](Communicator& world) {
        CheckpointerOptions options;
        options.files = &files;
        return Checkpointer::Open(kRoot, Unowned(world), options).status();
      };
      const auto statuses = comm::testing::RunRefusedRanks(2, open);
      if (files.calls() <= call) break;
      EXPECT_THAT(statuses, ::testing::Each(fsdp::testing::StatusIs(
                                fault.code, ::testing::HasSubstr("/"))));
      files.FailCall(/*call=*/-1, /*error=*/0, /*for_good=*/false);
      EXPECT_OK(RunAllRanks(2, open));
      if (::testing::Test::HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
