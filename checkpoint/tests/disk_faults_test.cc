// Disks that are full, broken or read-only at any call: all ranks say so, what
// was saved before is there, and the next save works once the fault is gone.
#include <cerrno>
#include <cstdint>
#include <iostream>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/files/testing/forwarding_file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
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
using ::fsdp::testing::Unowned;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr char kRoot[] = "/run";

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

struct Scenario {
  int ranks = 1;
  bool async = false;
  bool replaces = false;  // step 1; otherwise it is step 2
};

TrainingSetup Setup() {
  TrainingSetup setup;
  setup.optimizer = OptimizerKind::kSgd;  // fewer files
  setup.averages = false;
  return setup;
}

// What the ranks of one run have in common.
class FaultyRun {
 public:
  FaultyRun(const Scenario& scenario, const Fault& fault, int64_t call)
      : scenario_(scenario), fault_(fault), call_(call), files_(disk_) {}

  absl::Status Run(Communicator& world) {
    FSDP_ASSIGN_OR_RETURN(const auto training,
                          ShardedTraining::Make(world, Setup(), /*seed=*/1));
    FSDP_ASSIGN_OR_RETURN(
        const auto checkpoints,
        Checkpointer::Open(kRoot, Unowned(world), CommonOptions()));
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
  CheckpointerOptions CommonOptions() {
    CheckpointerOptions options;
    options.files = &files_;
    options.overwrite = scenario_.replaces;
    options.timeout = absl::Seconds(20);
    return options;
  }

  absl::Status Meet(Communicator& world) {
    return comm::Barrier(world, "meet", absl::Now() + absl::Seconds(20));
  }
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
      EXPECT_THAT(statuses,
                  Each(fsdp::testing::StatusIs(fault.code, HasSubstr("/"))));
      files.FailCall(/*call=*/-1, /*error=*/0, /*for_good=*/false);
      EXPECT_OK(RunAllRanks(2, open));
      if (::testing::Test::HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
