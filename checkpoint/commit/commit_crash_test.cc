// A run that dies, or whose disk fails, at every call that changes the disk.
#include <cerrno>
#include <cstdint>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/commit/checkpoint_folder.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/checkpoint_names.h"
#include "checkpoint/commit/testing/save_files.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/faulty_file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::testing::HasSubstr;

constexpr char kRoot[] = "/run";
constexpr int kSeeds = 12;

// Checkpoint versions in the order in which they are saved: (step, version).
struct Saved {
  int64_t step;
  uint32_t version;
};
constexpr Saved kBefore[] = {{1, 1}, {2, 2}};
// The last one replaces the one before.
constexpr Saved kRun[] = {{3, 3}, {3, 4}};

// What a run does; `done` becomes how many of kRun were committed.
absl::Status RunOnce(FileSystem& files, size_t& done) {
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointFolder> folder,
                        CheckpointFolder::Claim(files, kRoot));
  for (const Saved& saved : kRun) {
    FSDP_RETURN_IF_ERROR(Save(files, *folder, saved.step,
                              ContentsOf(saved.version), /*overwrite=*/true));
    ++done;
  }
  Retention retention;
  retention.keep_last = 1;
  return folder->Prune(retention).status();
}

// A disk with the checkpoints of an earlier run.
std::unique_ptr<SimulatedFileSystem> Disk() {
  auto disk = std::make_unique<SimulatedFileSystem>();
  const auto folder = CheckpointFolder::Claim(*disk, kRoot);
  EXPECT_OK(folder);
  for (const Saved& saved : kBefore) {
    EXPECT_OK(Save(*disk, **folder, saved.step, ContentsOf(saved.version)));
  }
  return disk;
}

// The version of a checkpoint that is sound; 0 for none.
uint32_t VersionOf(FileSystem& files, const std::string& path) {
  const absl::StatusOr<Contents> contents = Load(files, path);
  EXPECT_OK(contents);
  for (uint32_t version = 1; version <= 4 && contents.ok(); ++version) {
    if (*contents == ContentsOf(version)) return version;
  }
  return 0;
}

// After a run that had committed `done`: the latest is the last of them or the
// one that was under way, to the bit; all else that claims to be one is sound;
// the next run finds and leaves order.
void Check(FileSystem& files, size_t done) {
  ASSERT_OK_AND_ASSIGN(const std::optional<Committed> latest,
                       LatestCheckpoint(files, kRoot));
  ASSERT_TRUE(latest.has_value());
  const uint32_t version = VersionOf(files, latest->path);
  EXPECT_GE(version, 2 + done);
  EXPECT_LE(version, 3 + done);
  ASSERT_OK_AND_ASSIGN(const std::vector<Committed> list,
                       ListCheckpoints(files, kRoot));
  for (const Committed& one : list) {
    EXPECT_NE(VersionOf(files, one.path), 0) << one.path;
  }
  const auto folder = CheckpointFolder::Claim(files, kRoot);
  ASSERT_OK(folder);
  const auto again = LatestCheckpoint(files, kRoot);
  ASSERT_OK(again);
  // What was committed, if nobody has said so yet.
  EXPECT_GE(VersionOf(files, (*again)->path), version);
  EXPECT_EQ((*again)->step, list.back().step);
  EXPECT_EQ((*again)->path, absl::StrCat(kRoot, "/step-", (*again)->step));
  ASSERT_OK_AND_ASSIGN(const std::vector<std::string> names, files.List(kRoot));
  for (const std::string& name : names) {
    const std::optional<StepFolder> step = ParseStepName(name);
    EXPECT_TRUE(!step.has_value() || step->stage == Stage::kCommitted) << name;
  }
  EXPECT_OK(Save(files, **folder, 9, ContentsOf(1)));
  EXPECT_EQ((*LatestCheckpoint(files, kRoot))->step, 9);
}

int64_t CallsOfARun() {
  const auto disk = Disk();
  FaultyFileSystem files(*disk);
  size_t done = 0;
  EXPECT_OK(RunOnce(files, done));
  EXPECT_EQ(done, 2);
  return files.calls();
}

TEST(CommitCrashTest, AProcessIsKilledAtEveryCall) {
  const int64_t calls = CallsOfARun();
  std::cout << "K = " << calls << " calls that change the disk" << std::endl;
  for (int64_t call = 0; call <= calls; ++call) {
    SCOPED_TRACE(absl::StrCat("killed at call ", call));
    const auto disk = Disk();
    FaultyFileSystem files(*disk);
    files.StopAtCall(call);
    size_t done = 0;
    EXPECT_EQ(RunOnce(files, done).ok(), call == calls);
    disk->KillProcess();
    Check(*disk, done);
  }
}

TEST(CommitCrashTest, PowerIsLostAtEveryCall) {
  const int64_t calls = CallsOfARun();
  for (int64_t call = 0; call <= calls; ++call) {
    for (int seed = 0; seed < kSeeds; ++seed) {
      SCOPED_TRACE(absl::StrCat("power lost at call ", call, ", seed ", seed));
      const auto disk = Disk();
      FaultyFileSystem files(*disk);
      files.StopAtCall(call);
      size_t done = 0;
      EXPECT_EQ(RunOnce(files, done).ok(), call == calls);
      disk->LosePower(seed);
      Check(*disk, done);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TEST(CommitCrashTest, TheDiskFailsAtEveryCall) {
  const int64_t calls = CallsOfARun();
  const std::map<int, absl::StatusCode> codes = {
      {ENOSPC, absl::StatusCode::kResourceExhausted},
      {EIO, absl::StatusCode::kUnavailable},
      {EROFS, absl::StatusCode::kPermissionDenied}};
  for (const auto& [error, code] : codes) {
    for (int64_t call = 0; call < calls; ++call) {
      for (const bool for_good : {false, true}) {
        SCOPED_TRACE(absl::StrCat("errno ", error, " at call ", call));
        const auto disk = Disk();
        FaultyFileSystem files(*disk);
        files.FailCall(call, error, for_good);
        size_t done = 0;
        const absl::Status status = RunOnce(files, done);
        EXPECT_EQ(status.code(), code);
        EXPECT_THAT(std::string(status.message()), HasSubstr(kRoot));
        Check(*disk, done);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
