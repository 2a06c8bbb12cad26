// Checkpoints that are committed by their manifests, on storage that does no
// more than a mounted object store.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/commit/checkpoint_folder.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/commit/save_layout.h"
#include "checkpoint/commit/testing/save_files.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/forwarding_file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

absl::StatusOr<std::unique_ptr<CheckpointFolder>> ClaimOn(
    FileSystem& files, CommitBy commit_by = CommitBy::kManifest) {
  return CheckpointFolder::Claim(files, "/r", commit_by);
}

absl::Status SaveSteps(FileSystem& files, const std::vector<int64_t>& steps,
                       CommitBy commit_by = CommitBy::kManifest) {
  FSDP_ASSIGN_OR_RETURN(const auto folder, ClaimOn(files, commit_by));
  for (const int64_t step : steps) {
    FSDP_RETURN_IF_ERROR(Save(files, *folder, step, ContentsOf(step)));
  }
  return absl::OkStatus();
}

class ByManifestTest : public ::testing::Test {
 protected:
  std::unique_ptr<CheckpointFolder> Claim(
      CommitBy commit_by = CommitBy::kManifest) {
    auto folder = ClaimOn(files_, commit_by);
    EXPECT_OK(folder);
    return *std::move(folder);
  }
  std::vector<int64_t> Steps() { return StepsIn(files_, "/r"); }
  int64_t Latest() { return LatestIn(files_, "/r"); }

  SimulatedFileSystem disk_;
  ObjectStoreMount files_{disk_};
};

TEST_F(ByManifestTest, AStepIsACheckpointOnceItsManifestIsThere) {
  const auto folder = Claim();
  EXPECT_EQ(Latest(), -1);
  ASSERT_OK_AND_ASSIGN(const std::string path, folder->Begin(7));
  EXPECT_EQ(path, "/r/step-7");
  ASSERT_OK_AND_ASSIGN(
      const Manifest manifest,
      WriteFiles(files_, path, 7, ContentsOf(7), /*in_order=*/true));
  EXPECT_EQ(Latest(), -1);
  EXPECT_THAT(Steps(), ::testing::IsEmpty());
  ASSERT_OK(folder->Commit(7, manifest));
  EXPECT_EQ(Latest(), 7);
  EXPECT_EQ(*Load(files_, "/r/step-7"), ContentsOf(7));
  EXPECT_EQ(*ReadFile(files_, "/r/latest", 99), "step-7\n");
}

TEST_F(ByManifestTest, LatestMayBeOldOrMissing) {
  ASSERT_OK(SaveSteps(files_, {3, 5}));
  for (const char* text : {"step-3\n", "step-4\n", ""}) {
    ASSERT_OK(ReplaceFile(disk_, "/r/latest", text));
    EXPECT_EQ(Latest(), 5) << text;
  }
  ASSERT_OK(files_.RemoveFile("/r/latest"));
  EXPECT_EQ(Latest(), 5);
  ASSERT_OK(SaveSteps(files_, {6}));
  EXPECT_EQ(*ReadFile(files_, "/r/latest", 99), "step-6\n");
}

TEST_F(ByManifestTest, WhatHasNoManifestGoesWithTheNextRun) {
  ASSERT_OK(SaveSteps(files_, {1}));
  ASSERT_OK(files_.MakeFolder("/r/step-2"));
  ASSERT_OK(WriteNewFile(files_, "/r/step-2/model", "half"));
  EXPECT_EQ(Latest(), 1);
  EXPECT_THAT(Steps(), ElementsAre(1));
  Claim();
  EXPECT_THAT(*files_.List("/r"),
              ElementsAre(kByManifestName, kMarkerName, "latest", "step-1"));
}

// Of no bytes, or not all of them.
TEST_F(ByManifestTest, ATornManifestIsNone) {
  ASSERT_OK(SaveSteps(files_, {1}));
  for (const size_t bytes : {0, 1, 100}) {
    ASSERT_OK(SaveSteps(files_, {2}));
    const std::string whole = *ReadFile(files_, "/r/step-2/manifest.json", 999);
    ASSERT_OK(
        WriteFile(disk_, "/r/step-2/manifest.json", whole.substr(0, bytes)));
    ASSERT_OK(WriteFile(disk_, "/r/latest", "step-1\n"));
    EXPECT_EQ(Latest(), 1);
    Claim();
    EXPECT_THAT(Steps(), ElementsAre(1));
  }
}

// Whoever loads it hears of it; and it stays.
TEST_F(ByManifestTest, WhatWasFinishedAndIsDamagedIsStillTheLatest) {
  ASSERT_OK(SaveSteps(files_, {1, 2}));
  ASSERT_OK(WriteFile(disk_, "/r/step-2/manifest.json", "{}"));
  ASSERT_OK(WriteFile(disk_, "/r/step-1/manifest.json", "{}"));
  EXPECT_EQ(Latest(), 2);
  Claim();
  EXPECT_THAT(Steps(), ElementsAre(1, 2));
}

TEST_F(ByManifestTest, AStepThatIsThere) {
  ASSERT_OK(SaveSteps(files_, {7}));
  const auto folder = Claim();
  EXPECT_THAT(folder->Begin(7),
              StatusIs(Code::kAlreadyExists, HasSubstr("/r/step-7 is there")));
  // Which is not what a save that fails has left.
  EXPECT_OK(folder->Discard(7));
  EXPECT_EQ(*Load(files_, "/r/step-7"), ContentsOf(7));
  EXPECT_OK(Save(files_, *folder, 7, ContentsOf(8), /*overwrite=*/true));
  EXPECT_EQ(*Load(files_, "/r/step-7"), ContentsOf(8));
}

TEST_F(ByManifestTest, WhatIsGivenUpCanBeBegunAgain) {
  const auto folder = Claim();
  ASSERT_OK_AND_ASSIGN(const std::string path, folder->Begin(1));
  ASSERT_OK(WriteNewFile(files_, path + "/stale", "stale"));
  EXPECT_OK(folder->Discard(1));
  EXPECT_OK(folder->Discard(1));
  EXPECT_THAT(*files_.List("/r"), ElementsAre(kByManifestName, kMarkerName));
  // As if it could not be removed.
  ASSERT_OK(files_.MakeFolder(path));
  ASSERT_OK(WriteNewFile(files_, path + "/stale", "stale"));
  ASSERT_OK(Save(files_, *folder, 1, ContentsOf(1)));
  EXPECT_EQ(*Load(files_, path), ContentsOf(1));
}

TEST_F(ByManifestTest, Prune) {
  ASSERT_OK(SaveSteps(files_, {1, 2, 3, 4, 5, 6}));
  const auto folder = Claim();
  EXPECT_THAT(*folder->Prune({1, 2, {3}}), ElementsAre(1, 5));
  EXPECT_THAT(*folder->Prune({2, 0, {}}), ElementsAre(2, 3));
  EXPECT_THAT(*files_.List("/r"), ElementsAre(kByManifestName, kMarkerName,
                                              "latest", "step-4", "step-6"));
}

// Steps above the one that is saved are of a line that was given up.
TEST_F(ByManifestTest, ALineThatWasGivenUp) {
  ASSERT_OK(SaveSteps(files_, {4, 6, 7, 10}));
  ASSERT_OK(SaveSteps(files_, {5}));
  EXPECT_EQ(Latest(), 5);
  EXPECT_THAT(Steps(), ElementsAre(4, 5, 6, 7, 10));
  EXPECT_EQ(*Load(files_, "/r/step-10"), ContentsOf(10));
  ASSERT_OK(files_.RemoveFile("/r/latest"));
  EXPECT_EQ(Latest(), 5);
  // What is saved in the place of one is none of them.
  {
    const auto folder = Claim();
    ASSERT_OK(Save(files_, *folder, 7, ContentsOf(77), /*overwrite=*/true));
  }
  EXPECT_EQ(Latest(), 7);
  EXPECT_EQ(*Load(files_, "/r/step-7"), ContentsOf(77));
  ASSERT_OK(SaveSteps(files_, {12}));
  EXPECT_EQ(Latest(), 12);
  // Nothing else is left.
  for (const char* step : {"4", "5", "7", "12"}) {
    ASSERT_OK(
        files_.RemoveFile(absl::StrCat("/r/step-", step, "/manifest.json")));
  }
  EXPECT_EQ(Latest(), 10);
}

// What a loader finds changes once, whatever call the run dies at.
TEST_F(ByManifestTest, DyingWhileALineIsGivenUp) {
  for (int64_t call = 0;; ++call) {
    SCOPED_TRACE(call);
    SimulatedFileSystem disk;
    ObjectStoreMount mount(disk);
    ASSERT_OK(SaveSteps(mount, {4, 6, 7}));
    FaultyFileSystem files(mount);
    files.StopAtCall(call);
    const absl::Status saved = SaveSteps(files, {5});
    disk.KillProcess();
    ObjectStoreMount next(disk);
    if (saved.ok()) {
      EXPECT_EQ(LatestIn(next, "/r"), 5);
      break;
    }
    // As before, the one that the run went on from, or the new one.
    EXPECT_THAT(LatestIn(next, "/r"), ::testing::AnyOf(7, 4, 5));
    EXPECT_EQ(*Load(next, absl::StrCat("/r/step-", LatestIn(next, "/r"))),
              ContentsOf(LatestIn(next, "/r")));
    ASSERT_OK(SaveSteps(next, {8}));
    EXPECT_EQ(LatestIn(next, "/r"), 8);
  }
}

// On storage that can do both.
TEST_F(ByManifestTest, AFolderMayChangeItsWay) {
  ASSERT_OK(SaveSteps(disk_, {4, 6}, CommitBy::kRename));
  ASSERT_OK(SaveSteps(disk_, {5}, CommitBy::kRename));
  EXPECT_EQ(LatestIn(disk_, "/r"), 5);
  ASSERT_OK(ClaimOn(disk_));
  EXPECT_EQ(LatestIn(disk_, "/r"), 5);
  ASSERT_OK(files_.RemoveFile("/r/latest"));
  EXPECT_EQ(LatestIn(disk_, "/r"), 5);
  ASSERT_OK(SaveSteps(files_, {7}));
  ASSERT_OK(WriteFile(disk_, "/r/latest", "step-4\n"));
  EXPECT_EQ(LatestIn(disk_, "/r"), 7);
  // What is left is left no longer either way.
  ASSERT_OK(files_.MakeFolder("/r/step-8"));
  ASSERT_OK(ClaimOn(disk_, CommitBy::kRename));
  EXPECT_EQ(LatestIn(disk_, "/r"), 7);
  EXPECT_THAT(*files_.List("/r"), ElementsAre(kMarkerName, "latest", "step-4",
                                              "step-5", "step-6", "step-7"));
  ASSERT_OK(SaveSteps(disk_, {9}, CommitBy::kRename));
  EXPECT_EQ(LatestIn(disk_, "/r"), 9);
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
