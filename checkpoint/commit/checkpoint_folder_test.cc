#include "checkpoint/commit/checkpoint_folder.h"

#include <cerrno>
#include <functional>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/files/testing/forwarding_file_system.h"
#include "base/files/testing/simulated_file_system.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/commit/testing/save_files.h"

namespace fsdp::checkpoint::testing {
namespace {

using Code = absl::StatusCode;
using ::fsdp::testing::FaultyFileSystem;
using ::fsdp::testing::ForwardingFileSystem;
using ::fsdp::testing::ObjectStoreMount;
using ::fsdp::testing::ReadHookFileSystem;
using ::fsdp::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(CheckpointNamesTest, RoundTrips) {
  for (const int64_t step :
       {int64_t{0}, int64_t{7}, std::numeric_limits<int64_t>::max()}) {
    for (const Stage stage :
         {Stage::kCommitted, Stage::kReplaced, Stage::kDeleted}) {
      const auto parsed = ParseStepName(StepName(step, stage));
      ASSERT_TRUE(parsed.has_value());
      EXPECT_EQ(parsed->step, step);
      EXPECT_EQ(parsed->stage, stage);
    }
  }
  EXPECT_EQ(WrittenPath("/r", 7, "4f1a", CommitBy::kRename),
            "/r/step-7.incomplete-4f1a");
  const auto incomplete = ParseStepName("step-7.incomplete-4f1a");
  ASSERT_TRUE(incomplete.has_value());
  EXPECT_EQ(incomplete->step, 7);
  EXPECT_EQ(incomplete->stage, Stage::kIncomplete);
  for (const char* name :
       {"", "step-", "step-07", "step--1", "step-+1", "step-1.", "step-1.new",
        "step-1 ", "step-1.deleted.", "step-1.incomplete", "step-1.incomplete-",
        "step-1.incomplete-G", "step-01.incomplete-a",
        "step-99999999999999999999", "latest"}) {
    EXPECT_FALSE(ParseStepName(name).has_value()) << name;
  }
}

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

// The folder "/r" on `Files`.
template <typename Files, CommitBy kCommitBy>
class FolderTest : public ::testing::Test {
 protected:
  std::unique_ptr<CheckpointFolder> Claim() {
    auto folder = ClaimOn(files_, kCommitBy);
    EXPECT_OK(folder);
    return *std::move(folder);
  }
  std::vector<int64_t> Steps() { return StepsIn(files_, "/r"); }
  int64_t Latest() { return LatestIn(files_, "/r"); }

  SimulatedFileSystem disk_;
  Files files_{disk_};
};

using CheckpointFolderTest =
    FolderTest<ForwardingFileSystem, CommitBy::kRename>;

TEST_F(CheckpointFolderTest, SavesOneAfterTheOther) {
  {
    const auto folder = Claim();
    EXPECT_EQ(Latest(), -1);
    EXPECT_OK(Save(files_, *folder, 10, ContentsOf(1)));
    EXPECT_EQ(*ReadFile(files_, "/r/latest", 99), "step-10\n");
    EXPECT_OK(Save(files_, *folder, 5, ContentsOf(2)));
  }
  EXPECT_THAT(Steps(), ElementsAre(5, 10));
  EXPECT_EQ(Latest(), 5);  // it was saved last
  EXPECT_EQ(*Load(files_, "/r/step-5"), ContentsOf(2));
  EXPECT_THAT(*files_.List("/r"),
              ElementsAre(kMarkerName, "latest", "step-10", "step-5"));
}

TEST_F(CheckpointFolderTest, AStepThatIsThere) {
  ASSERT_OK(SaveSteps(files_, {7}, CommitBy::kRename));
  const auto folder = Claim();
  EXPECT_THAT(folder->Begin(7),
              StatusIs(Code::kAlreadyExists,
                       AllOf(HasSubstr("/r/step-7 is there already"),
                             HasSubstr("save with overwrite"))));
  EXPECT_OK(Save(files_, *folder, 7, ContentsOf(8), /*overwrite=*/true));
  EXPECT_EQ(*Load(files_, "/r/step-7"), ContentsOf(8));
  EXPECT_THAT(*files_.List("/r"), ElementsAre(kMarkerName, "latest", "step-7"));
}

TEST_F(CheckpointFolderTest, WhatCannotBeCommitted) {
  const auto folder = Claim();
  EXPECT_THAT(folder->Commit(0, Manifest()),
              StatusIs(Code::kFailedPrecondition, HasSubstr("not begun")));
  EXPECT_THAT(folder->Begin(-1),
              StatusIs(Code::kInvalidArgument, HasSubstr("no such step")));
  ASSERT_OK_AND_ASSIGN(const std::string path, folder->Begin(0));
  EXPECT_EQ(path, absl::StrCat("/r/step-0.incomplete-", folder->token()));
  ASSERT_OK_AND_ASSIGN(Manifest manifest,
                       WriteFiles(files_, path, 0, ContentsOf(1)));
  manifest.files["lost"] = {};
  EXPECT_THAT(folder->Commit(0, manifest),
              StatusIs(Code::kDataLoss, HasSubstr("lost: is missing")));
  EXPECT_THAT(Steps(), IsEmpty());
  EXPECT_OK(folder->Discard(0));
  EXPECT_OK(folder->Discard(0));
  EXPECT_THAT(*files_.List("/r"), ElementsAre(kMarkerName));
}

TEST_F(CheckpointFolderTest, AFolderThatIsNotOurs) {
  ASSERT_OK(files_.MakeFolder("/r"));
  ASSERT_OK(ReplaceFile(files_, "/r/thesis.tex", "!"));
  EXPECT_THAT(CheckpointFolder::Claim(files_, "/r"),
              StatusIs(Code::kFailedPrecondition,
                       AllOf(HasSubstr("something else in it (thesis.tex)"),
                             HasSubstr("name a new or an empty folder"))));
  EXPECT_THAT(CheckpointFolder::Claim(files_, "/no/where"),
              StatusIs(Code::kNotFound, HasSubstr("/no")));
  ASSERT_OK(ReplaceFile(files_, absl::StrCat("/r/", kMarkerName), ""));
  Claim();
  EXPECT_EQ(*ReadFile(files_, "/r/thesis.tex", 9), "!");
}

TEST_F(CheckpointFolderTest, TwoRuns) {
  const auto folder = Claim();
  EXPECT_THAT(CheckpointFolder::Claim(files_, "/r"),
              StatusIs(Code::kFailedPrecondition,
                       AllOf(HasSubstr("/r"), HasSubstr("process "),
                             HasSubstr(" on "), HasSubstr(", since "))));
}

TEST_F(CheckpointFolderTest, LeftoversOfDeadRunsGo) {
  ASSERT_OK(SaveSteps(files_, {1}, CommitBy::kRename));
  ASSERT_OK(files_.MakeFolder("/r/step-2.incomplete-77"));
  ASSERT_OK(ReplaceFile(files_, "/r/step-2.incomplete-77/model", "half"));
  ASSERT_OK(files_.MakeFolder("/r/step-0.deleted"));
  ASSERT_OK(ReplaceFile(files_, "/r/latest.tmp", "step"));
  ASSERT_OK(files_.MakeFolder("/r/step-notes"));
  Claim();
  EXPECT_THAT(*files_.List("/r"),
              ElementsAre(kMarkerName, "latest", "step-1", "step-notes"));
}

// Ranks of a run that was killed may go on for a while.
TEST_F(CheckpointFolderTest, DeadRunsDoNotWriteIntoTheNextOnes) {
  std::string stale;
  {
    const auto killed = Claim();
    ASSERT_OK_AND_ASSIGN(stale, killed->Begin(2));
  }
  {
    const auto folder = Claim();
    ASSERT_OK(folder->Begin(2));
    ASSERT_OK(files_.MakeFolder(stale));
    ASSERT_OK(ReplaceFile(files_, stale + "/model", "stale"));
    ASSERT_OK(Save(files_, *folder, 2, ContentsOf(2)));
  }
  EXPECT_EQ(*Load(files_, "/r/step-2"), ContentsOf(2));
  // This is how it is if the run ended before it could name the latest.
  ASSERT_OK(files_.RemoveFile("/r/latest"));
  ASSERT_OK(ReplaceFile(files_, "/r/latest.tmp", "step-2\n"));
  Claim();
  EXPECT_EQ(Latest(), 2);
  EXPECT_THAT(*files_.List("/r"), ElementsAre(kMarkerName, "latest", "step-2"));
}

TEST_F(CheckpointFolderTest, AReplacementThatWasNotFinished) {
  ASSERT_OK(SaveSteps(files_, {1, 2}, CommitBy::kRename));
  ASSERT_OK(files_.Rename("/r/step-2", "/r/step-2.replaced"));
  EXPECT_EQ(Latest(), 2);
  Claim();
  EXPECT_EQ(*Load(files_, "/r/step-2"), ContentsOf(2));
  // A damaged checkpoint makes room for the one before.
  ASSERT_OK(files_.Rename("/r/step-2", "/r/step-2.replaced"));
  ASSERT_OK(files_.MakeFolder("/r/step-2"));
  ASSERT_OK(ReplaceFile(files_, "/r/step-2/manifest.json", "{}"));
  EXPECT_EQ((*LatestCheckpoint(files_, "/r"))->path, "/r/step-2.replaced");
  Claim();
  EXPECT_EQ(*Load(files_, "/r/step-2"), ContentsOf(2));
  EXPECT_THAT(*files_.List("/r"),
              ElementsAre(kMarkerName, "latest", "step-1", "step-2"));
}

// It may be as sound as the old one is, and is what was saved last.
TEST_F(CheckpointFolderTest, AReplacementThatCannotBeReadStays) {
  ASSERT_OK(SaveSteps(files_, {2}, CommitBy::kRename));
  ASSERT_OK(files_.Rename("/r/step-2", "/r/step-2.replaced"));
  ASSERT_OK(files_.MakeFolder("/r/step-2"));
  ASSERT_OK_AND_ASSIGN(const Manifest manifest,
                       WriteFiles(files_, "/r/step-2", 2, ContentsOf(3)));
  ASSERT_OK(
      ReplaceFile(files_, "/r/step-2/manifest.json", FormatManifest(manifest)));
  ReadHookFileSystem unreadable(files_, [](const std::string& path) {
    return path == "/r/step-2/manifest.json" ? FileError(EIO, "read", path)
                                             : absl::OkStatus();
  });
  EXPECT_THAT(CheckpointFolder::Claim(unreadable, "/r"),
              StatusIs(Code::kUnavailable, HasSubstr("step-2/manifest.json")));
  Claim();
  EXPECT_EQ(*Load(files_, "/r/step-2"), ContentsOf(3));
}

// A run dies before it puts what it has written in the place of an older step.
TEST_F(CheckpointFolderTest, AReplacementThatWasNotBegunIsNotTheLatest) {
  ASSERT_OK(SaveSteps(files_, {1, 2}, CommitBy::kRename));
  ASSERT_OK(files_.MakeFolder("/r/step-1.incomplete-77"));
  ASSERT_OK(ReplaceFile(files_, "/r/step-1.incomplete-77/manifest.json", "{}"));
  ASSERT_OK(ReplaceFile(files_, "/r/latest.tmp", "step-1\n"));
  Claim();
  EXPECT_EQ(Latest(), 2);
  EXPECT_THAT(*files_.List("/r"),
              ElementsAre(kMarkerName, "latest", "step-1", "step-2"));
}

TEST_F(CheckpointFolderTest, LatestThatSaysNothingTrue) {
  ASSERT_OK(SaveSteps(files_, {1, 2}, CommitBy::kRename));
  for (const char* text : {"", "step-3\n", "step-01\n", "../step-1\n"}) {
    ASSERT_OK(ReplaceFile(files_, "/r/latest", text));
    EXPECT_EQ(Latest(), 2) << text;
  }
  ASSERT_OK(ReplaceFile(files_, "/r/latest", "step-1"));
  EXPECT_EQ(Latest(), 1);
  ASSERT_OK(files_.RemoveFile("/r/latest"));
  EXPECT_EQ(Latest(), 2);
  // Whoever loads a damaged checkpoint is told so; an older one is not taken
  // for the latest.
  ASSERT_OK(ReplaceFile(files_, "/r/step-2/manifest.json", "{}"));
  EXPECT_THAT(Steps(), ElementsAre(1, 2));
  EXPECT_EQ(Latest(), 2);
}

TEST_F(CheckpointFolderTest, PruneKeepsWhatItIsToldAndTheLatest) {
  ASSERT_OK(SaveSteps(files_, {1, 2, 3, 4, 5, 6}, CommitBy::kRename));
  ASSERT_OK(ReplaceFile(files_, "/r/latest", "step-1\n"));
  const auto folder = Claim();
  EXPECT_THAT(*folder->Prune({}), IsEmpty());
  EXPECT_THAT(*folder->Prune({9, 0, {}}), IsEmpty());
  EXPECT_THAT(*folder->Prune({1, 2, {3}}), ElementsAre(5));
  EXPECT_THAT(Steps(), ElementsAre(1, 2, 3, 4, 6));
  EXPECT_THAT(*folder->Prune({2, 0, {}}), ElementsAre(2, 3));
  EXPECT_THAT(*files_.List("/r"),
              ElementsAre(kMarkerName, "latest", "step-1", "step-4", "step-6"));
}

// Checkpoints that are committed by their manifests, on storage that does no
// more than a mounted object store.
using ByManifestTest = FolderTest<ObjectStoreMount, CommitBy::kManifest>;

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

// Looks once for each call of the file system that this makes, each time at a
// disk that `prepare` has made, where another run does `meanwhile` just before
// that call.
using OnDisk = std::function<absl::Status(FileSystem&)>;
void LookAtEachCall(const OnDisk& prepare, const OnDisk& meanwhile,
                    const std::function<void(FileSystem&)>& look) {
  for (int call = 0, calls = 1; call < calls; ++call) {
    SCOPED_TRACE(call);
    SimulatedFileSystem disk;
    ASSERT_OK(prepare(disk));
    calls = 0;
    ReadHookFileSystem files(disk, [&](const std::string&) {
      return calls++ == call ? meanwhile(disk) : absl::OkStatus();
    });
    look(files);
  }
}

// The run does so in its own way.
TEST(LatestCheckpointTest, WhileAStepIsSaved) {
  for (const CommitBy commit_by : {CommitBy::kRename, CommitBy::kManifest}) {
    LookAtEachCall(
        [](FileSystem& disk) -> absl::Status {
          FSDP_RETURN_IF_ERROR(SaveSteps(disk, {4, 6}, CommitBy::kRename));
          return SaveSteps(disk, {5}, CommitBy::kRename);
        },
        [&](FileSystem& disk) { return SaveSteps(disk, {7}, commit_by); },
        [](FileSystem& files) {
          EXPECT_THAT(LatestIn(files, "/r"), ::testing::AnyOf(5, 7));
        });
  }
}

// The run removes the one that was the latest, too. Step 9 was given up.
TEST(LatestCheckpointTest, WhileTheOneBeforeIsRemoved) {
  LookAtEachCall(
      [](FileSystem& disk) -> absl::Status {
        FSDP_RETURN_IF_ERROR(SaveSteps(disk, {2, 9}, CommitBy::kRename));
        return SaveSteps(disk, {3}, CommitBy::kRename);
      },
      [](FileSystem& disk) -> absl::Status {
        FSDP_RETURN_IF_ERROR(SaveSteps(disk, {4}, CommitBy::kRename));
        FSDP_ASSIGN_OR_RETURN(const auto folder,
                              CheckpointFolder::Claim(disk, "/r"));
        return folder->Prune({/*keep_last=*/1, 0, {}, /*ignore=*/{9}}).status();
      },
      [](FileSystem& files) {
        EXPECT_THAT(LatestIn(files, "/r"), ::testing::AnyOf(3, 4));
      });
}

// The run opens the folder and commits by renames from then on.
TEST(LatestCheckpointTest, WhileAFolderChangesItsWay) {
  LookAtEachCall(
      [](FileSystem& disk) -> absl::Status {
        FSDP_RETURN_IF_ERROR(SaveSteps(disk, {4, 6}));
        return WriteFile(disk, "/r/latest", "step-4\n");
      },
      [](FileSystem& disk) {
        return ClaimOn(disk, CommitBy::kRename).status();
      },
      [](FileSystem& files) { EXPECT_EQ(LatestIn(files, "/r"), 6); });
}

// Step 2 was written whole, as `latest` says, and is damaged since.
TEST(TornCheckpointsTest, WhileAStepIsSaved) {
  LookAtEachCall(
      [](FileSystem& disk) -> absl::Status {
        FSDP_RETURN_IF_ERROR(SaveSteps(disk, {1, 2}));
        return WriteFile(disk, "/r/step-2/manifest.json", "{}");
      },
      [](FileSystem& disk) { return SaveSteps(disk, {3}); },
      [](FileSystem& files) {
        EXPECT_THAT(*TornCheckpoints(files, "/r"), IsEmpty());
      });
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
