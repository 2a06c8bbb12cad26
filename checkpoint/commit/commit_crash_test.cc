// A run dies, or its disk fails, at every call that changes the disk.
#include <array>
#include <cerrno>
#include <cstdint>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/files/file_system.h"
#include "base/files/testing/forwarding_file_system.h"
#include "base/files/testing/simulated_file_system.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/commit/checkpoint_folder.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/save_layout.h"
#include "checkpoint/commit/testing/save_files.h"

namespace fsdp::checkpoint::testing {
namespace {

constexpr char kRoot[] = "/run";
constexpr int kSeeds = 12;

// Checkpoint versions in the order in which they are saved: (step, version).
struct Saved {
  int64_t step;
  uint32_t version;
};
constexpr Saved kBefore[] = {{1, 1}, {2, 2}};

using ::fsdp::testing::FaultyFileSystem;
using ::fsdp::testing::ObjectStoreMount;
using ::fsdp::testing::SimulatedFileSystem;
using Run = std::array<Saved, 2>;

Run RunOf(CommitBy commit_by) {
  // By rename, the last checkpoint replaces the one before; by manifest, the
  // first one replaces the latest that there is.
  return commit_by == CommitBy::kRename ? Run{{{3, 3}, {3, 4}}}
                                        : Run{{{2, 3}, {4, 4}}};
}

// By manifest, the replaced step is gone for a moment, and `latest` names it.
uint32_t OldestAfter(CommitBy commit_by, size_t done) {
  return commit_by == CommitBy::kManifest && done == 0 ? 1 : 2 + done;
}

// A disk, and how its run sees it.
struct Machine {
  explicit Machine(CommitBy commit_by) : commit_by(commit_by) {}

  FileSystem& files() {
    if (commit_by == CommitBy::kRename) return disk;
    return *mount;
  }

  // By a loss of power, or where `seed` is negative only of the process. What
  // the mount knows of open files goes with it.
  void Die(int seed) {
    if (seed < 0) {
      disk.KillProcess();
    } else {
      disk.LosePower(seed);
    }
    mount = std::make_unique<ObjectStoreMount>(disk);
  }

  const CommitBy commit_by;
  SimulatedFileSystem disk;
  std::unique_ptr<ObjectStoreMount> mount =
      std::make_unique<ObjectStoreMount>(disk);
};

// Does what a run does; `done` becomes how many of RunOf() were committed.
absl::Status RunOnce(FileSystem& files, CommitBy commit_by, size_t& done) {
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointFolder> folder,
                        CheckpointFolder::Claim(files, kRoot, commit_by));
  for (const Saved& saved : RunOf(commit_by)) {
    FSDP_RETURN_IF_ERROR(Save(files, *folder, saved.step,
                              ContentsOf(saved.version), /*overwrite=*/true));
    ++done;
  }
  Retention retention;
  retention.keep_last = 1;
  return folder->Prune(retention).status();
}

// Makes a machine with the checkpoints of an earlier run.
std::unique_ptr<Machine> MakeMachine(CommitBy commit_by) {
  auto machine = std::make_unique<Machine>(commit_by);
  FileSystem& files = machine->files();
  const auto folder = CheckpointFolder::Claim(files, kRoot, commit_by);
  EXPECT_OK(folder);
  for (const Saved& saved : kBefore) {
    EXPECT_OK(Save(files, **folder, saved.step, ContentsOf(saved.version)));
  }
  return machine;
}

// Returns the version of a sound checkpoint, 0 for none.
uint32_t VersionOf(FileSystem& files, const std::string& path) {
  const absl::StatusOr<Contents> contents = Load(files, path);
  EXPECT_OK(contents);
  for (uint32_t version = 1; version <= 4 && contents.ok(); ++version) {
    if (*contents == ContentsOf(version)) return version;
  }
  return 0;
}

// Checks that nothing but checkpoints is left.
void CheckIsTidy(FileSystem& files) {
  ASSERT_OK_AND_ASSIGN(const std::vector<std::string> names, files.List(kRoot));
  for (const std::string& name : names) {
    const std::optional<StepFolder> step = ParseStepName(name);
    if (!step.has_value()) continue;
    EXPECT_EQ(step->stage, Stage::kCommitted) << name;
    EXPECT_NE(VersionOf(files, JoinPath(kRoot, name)), 0) << name;
  }
}

// Checks the disk after a run that had committed `done`: the latest is the last
// of these or the one that was under way, to the bit; everything else that
// claims to be a checkpoint is sound; the next run finds and leaves order.
void Check(Machine& machine, size_t done) {
  FileSystem& files = machine.files();
  ASSERT_OK_AND_ASSIGN(const auto latest, LatestCheckpoint(files, kRoot));
  ASSERT_TRUE(latest.has_value());
  const uint32_t version = VersionOf(files, latest->path);
  EXPECT_GE(version, OldestAfter(machine.commit_by, done));
  EXPECT_LE(version, 3 + done);
  ASSERT_OK_AND_ASSIGN(const auto list, ListCheckpoints(files, kRoot));
  for (const Committed& one : list) {
    // By manifest, the checkpoint at which the run has died is passed over.
    if (machine.commit_by == CommitBy::kManifest && one.step > latest->step) {
      continue;
    }
    EXPECT_NE(VersionOf(files, one.path), 0) << one.path;
  }
  const auto folder = CheckpointFolder::Claim(files, kRoot, machine.commit_by);
  ASSERT_OK(folder);
  const auto again = LatestCheckpoint(files, kRoot);
  ASSERT_OK(again);
  // This claim may have announced what was committed.
  EXPECT_GE(VersionOf(files, (*again)->path), version);
  EXPECT_EQ((*again)->step, (*ListCheckpoints(files, kRoot)).back().step);
  EXPECT_EQ((*again)->path, absl::StrCat(kRoot, "/step-", (*again)->step));
  CheckIsTidy(files);
  EXPECT_OK(Save(files, **folder, 9, ContentsOf(1)));
  EXPECT_EQ((*LatestCheckpoint(files, kRoot))->step, 9);
}

// Checks a run that has replaced any of them.
void CheckNewest(FileSystem& files, bool fresh) {
  const absl::StatusOr<std::optional<Committed>> latest =
      LatestCheckpoint(files, kRoot);
  if (fresh && absl::IsNotFound(latest.status())) return;
  ASSERT_OK(latest);
  if (fresh && !latest->has_value()) return;
  ASSERT_TRUE(latest->has_value());
  EXPECT_NE(VersionOf(files, (*latest)->path), 0) << (*latest)->path;
}

class CommitCrashTest : public ::testing::TestWithParam<CommitBy> {
 protected:
  static int64_t CallsOfARun() {
    const auto machine = MakeMachine(GetParam());
    FaultyFileSystem files(machine->files());
    size_t done = 0;
    EXPECT_OK(RunOnce(files, GetParam(), done));
    EXPECT_EQ(done, 2);
    return files.calls();
  }
};

INSTANTIATE_TEST_SUITE_P(, CommitCrashTest,
                         ::testing::Values(CommitBy::kRename,
                                           CommitBy::kManifest),
                         [](const auto& test) {
                           return test.param == CommitBy::kRename
                                      ? std::string("ByRename")
                                      : std::string("ByManifest");
                         });

// The process is killed, or power is lost, with each number of seeds.
TEST_P(CommitCrashTest, ARunDiesAtEveryCall) {
  const int64_t calls = CallsOfARun();
  std::cout << "K = " << calls << " calls that change the disk" << std::endl;
  for (int64_t call = 0; call <= calls; ++call) {
    for (int seed = -1; seed < kSeeds; ++seed) {
      SCOPED_TRACE(absl::StrCat("at call ", call, ", seed ", seed));
      const auto machine = MakeMachine(GetParam());
      FaultyFileSystem files(machine->files());
      files.StopAtCall(call);
      size_t done = 0;
      EXPECT_EQ(RunOnce(files, GetParam(), done).ok(), call == calls);
      machine->Die(seed);
      Check(*machine, done);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TEST_P(CommitCrashTest, TheDiskFailsAtEveryCall) {
  const int64_t calls = CallsOfARun();
  const std::map<int, absl::StatusCode> codes = {
      {ENOSPC, absl::StatusCode::kResourceExhausted},
      {EIO, absl::StatusCode::kUnavailable},
      {EROFS, absl::StatusCode::kPermissionDenied}};
  for (const auto& [error, code] : codes) {
    for (int64_t call = 0; call < calls; ++call) {
      for (const bool for_good : {false, true}) {
        SCOPED_TRACE(absl::StrCat("errno ", error, " at call ", call));
        const auto machine = MakeMachine(GetParam());
        FaultyFileSystem files(machine->files());
        files.FailCall(call, error, for_good);
        size_t done = 0;
        const absl::Status status = RunOnce(files, GetParam(), done);
        EXPECT_EQ(status.code(), code);
        EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(kRoot));
        // What is said to be saved survives a loss of power.
        if (absl::StrContains(status.message(), " is saved, but ")) {
          ++done;
          machine->Die(/*seed=*/static_cast<int>(call));
        }
        Check(*machine, done);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

// A call that failed may never have come to the disk, although a run finds its
// effects: everything that the run saves survives a loss of power, and at any
// call of it the newest checkpoint is sound.
TEST_P(CommitCrashTest, PowerIsLostAfterAFailure) {
  const auto make = [](bool fresh) {
    return fresh ? std::make_unique<Machine>(GetParam())
                 : MakeMachine(GetParam());
  };
  for (const bool fresh : {false, true}) {
    const auto whole = make(fresh);
    FaultyFileSystem counting(whole->files());
    size_t done = 0;
    ASSERT_OK(RunOnce(counting, GetParam(), done));
    for (int64_t call = 0; call < counting.calls(); ++call) {
      for (int seed = 0; seed < kSeeds; ++seed) {
        SCOPED_TRACE(absl::StrCat("call ", call, ", seed ", seed));
        const auto machine = make(fresh);
        FaultyFileSystem failing(machine->files());
        failing.FailCall(call, EIO, /*for_good=*/false);
        ASSERT_FALSE(RunOnce(failing, GetParam(), done).ok());
        machine->Die(/*seed=*/-1);
        FaultyFileSystem stopping(machine->files());
        if (seed % 3 > 0) {
          stopping.StopAtCall((5 * call + 7 * seed) % counting.calls());
        }
        done = 0;
        const bool finished = RunOnce(stopping, GetParam(), done).ok();
        machine->Die(seed);
        if (finished) {
          Check(*machine, done);
        } else {
          CheckNewest(machine->files(), fresh);
        }
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

absl::Status ReplaceStepTwo(FileSystem& files) {
  FSDP_ASSIGN_OR_RETURN(
      const std::unique_ptr<CheckpointFolder> folder,
      CheckpointFolder::Claim(files, kRoot, CommitBy::kManifest));
  return Save(files, *folder, 2, ContentsOf(3), /*overwrite=*/true);
}

// A try that failed leaves changes that may never have come to the disk.
TEST(ReplacedByManifestTest, TheNewestIsSoundWhereverASecondTryDies) {
  const auto whole = MakeMachine(CommitBy::kManifest);
  FaultyFileSystem counting(whole->files());
  ASSERT_OK(ReplaceStepTwo(counting));
  constexpr int kFewSeeds = 2;
  for (int64_t failed = 0; failed < counting.calls(); ++failed) {
    for (int64_t call = failed % 2; call < counting.calls(); call += 2) {
      for (int seed = 0; seed < kFewSeeds; ++seed) {
        SCOPED_TRACE(absl::StrCat("fails at ", failed, ", dies at ", call,
                                  ", seed ", seed));
        const auto machine = MakeMachine(CommitBy::kManifest);
        FaultyFileSystem failing(machine->files());
        failing.FailCall(failed, EIO, /*for_good=*/false);
        EXPECT_FALSE(ReplaceStepTwo(failing).ok());
        FaultyFileSystem stopping(machine->files());
        stopping.StopAtCall(call);
        ReplaceStepTwo(stopping).IgnoreError();
        machine->Die(seed);
        CheckNewest(machine->files(), /*fresh=*/false);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
