#include "fsdp/resting/kept_files.h"

#include <filesystem>

#include "fsdp/testing/sharded_test.h"
#include "offload/testing/store_calls.h"

namespace fsdp::testing {
namespace {

namespace fs = std::filesystem;

constexpr absl::Duration kTimeout = absl::Seconds(30);

// Matches errors of all ranks that have these texts.
template <typename... Texts>
auto AllRefuse(const Texts&... texts) {
  return Each(StatusIs(Code::kFailedPrecondition,
                       AllOf(HasSubstr(std::string(texts))...)));
}

// Runs keep two files per rank, each run in a directory of its own.
class KeptFilesTest : public ::testing::Test {
 protected:
  KeptFilesTest()
      : root_(fs::path(::testing::TempDir()) /
              ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::remove_all(root_);
  }

  fs::path Directory(const std::string& run) const {
    fs::create_directories(root_ / run);
    return root_ / run;
  }
  fs::path File(const std::string& run, const std::string& kind, int rank,
                int ranks = 2) const {
    return Directory(run) / KeptFileName("k", kind, rank, ranks);
  }

  std::vector<offload::FileStoreOptions> FilesOf(
      const std::string& run, const Communicator& world) const {
    std::vector<offload::FileStoreOptions> files;
    for (const char* kind : {"parameters", "optimizer"}) {
      offload::FileStoreOptions& file = files.emplace_back();
      file.directory = Directory(run);
      file.name = KeptFileName("k", kind, world.rank(), world.world_size());
      file.owner = file.name;
      file.capacity = int64_t{2} * 4096;
      file.block_bytes = 4096;
      file.keep = true;
      file.max_regions = 4;
      file.queue = offload::QueueKind::kThreads;
    }
    return files;
  }

  absl::StatusOr<KeptFiles> Open(const std::string& run,
                                 Communicator& world) const {
    return OpenKeptFiles(FilesOf(run, world), world, kTimeout);
  }

  // Commits the next stage, which has one more step.
  static absl::Status Commit(KeptFiles& kept) {
    ++kept.stage.number;
    ++kept.stage.finished_step;
    kept.stage.session = kept.session;
    const absl::string_view bytes(reinterpret_cast<const char*>(&kept.stage),
                                  sizeof(kept.stage));
    for (const auto& store : kept.stores) {
      if (!store->Size(kStageRegion).ok()) {
        FSDP_RETURN_IF_ERROR(store->Create(kStageRegion, bytes.size()));
      }
      FSDP_RETURN_IF_ERROR(
          offload::testing::WriteNow(*store, kStageRegion, 0, bytes));
      FSDP_RETURN_IF_ERROR(offload::testing::Finish(store->Flush()));
    }
    return absl::OkStatus();
  }

  // Opens a run's files, perhaps for the first time, and takes steps.
  void GoOn(const std::string& run, int steps, int ranks = 2) const {
    ASSERT_OK(RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(KeptFiles kept, Open(run, world));
      for (int step = 0; step < steps; ++step) {
        FSDP_RETURN_IF_ERROR(Commit(kept));
      }
      return absl::OkStatus();
    }));
  }

  std::vector<absl::Status> Opened(const std::string& run,
                                   int ranks = 2) const {
    return RunRanks(
        ranks, [&](Communicator& world) { return Open(run, world).status(); });
  }

  // Returns the step that every rank finds.
  int64_t StepOf(const std::string& run) const {
    std::vector<int64_t> steps(2, -1);
    EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const KeptFiles kept, Open(run, world));
      steps[world.rank()] = kept.stage.finished_step;
      return absl::OkStatus();
    }));
    EXPECT_EQ(steps[0], steps[1]);
    return steps[0];
  }

  void Copy(const fs::path& from, const fs::path& to) const {
    fs::copy_file(from, to, fs::copy_options::overwrite_existing);
  }
  void CopyRun(const std::string& from, const std::string& to) const {
    fs::copy(Directory(from), Directory(to), fs::copy_options::recursive);
  }

  const fs::path root_;
};

// Both runs have equally many steps, so that nothing else tells them apart.
TEST_F(KeptFilesTest, FilesOfTwoRunsAreRefusedOnAllRanks) {
  for (const int rank : {0, 1}) {
    for (const char* kind : {"parameters", "optimizer"}) {
      fs::remove_all(root_);
      GoOn("a", /*steps=*/3);
      GoOn("b", /*steps=*/3);
      Copy(File("b", kind, rank), File("a", kind, rank));
      EXPECT_THAT(Opened("a"), AllRefuse("different runs", "begin anew"))
          << kind << " of rank " << rank;
    }
  }
}

TEST_F(KeptFilesTest, AllFilesOfARankThatAreOfAnotherRunAreNamed) {
  GoOn("a", /*steps=*/3);
  GoOn("b", /*steps=*/3);
  for (const char* kind : {"parameters", "optimizer"}) {
    Copy(File("b", kind, 1), File("a", kind, 1));
  }
  EXPECT_THAT(Opened("a"),
              AllRefuse("rank 1: ", "rank 0's", File("a", "parameters", 1)));
  // The refused files are unchanged.
  Copy(File("b", "parameters", 0), File("a", "parameters", 0));
  Copy(File("b", "optimizer", 0), File("a", "optimizer", 0));
  EXPECT_EQ(StepOf("a"), 3);
}

TEST_F(KeptFilesTest, CopiesOfARunThatBothWentOnDoNotMix) {
  GoOn("a", /*steps=*/3);
  CopyRun("a", "b");
  EXPECT_EQ(StepOf("b"), 3);
  GoOn("a", /*steps=*/2);
  GoOn("b", /*steps=*/2);
  Copy(File("b", "optimizer", 1), File("a", "optimizer", 1));
  EXPECT_THAT(Opened("a"),
              AllRefuse("rank 1: ", "both went on", File("a", "optimizer", 1)));
}

TEST_F(KeptFilesTest, ARunOnAnotherNumberOfRanksIsRefused) {
  GoOn("a", /*steps=*/3);
  for (const int ranks : {1, 3}) {
    EXPECT_THAT(Opened("a", ranks),
                AllRefuse("-of-2", "a run on 2 ranks",
                          absl::StrCat("has ", ranks), "OffloadOptions::name"));
  }
  EXPECT_EQ(StepOf("a"), 3);
}

// These names only look alike.
TEST_F(KeptFilesTest, FilesOfOtherNamesDoNotMatter) {
  GoOn("a", /*steps=*/1);
  for (const char* name :
       {"k2.parameters.0-of-3", "k.parameters.0-of-3.new", "k.parameters.0",
        "k.parameters.x-of-3", "k.gradients.0-of-3", "other"}) {
    Copy(File("a", "parameters", 0), Directory("a") / name);
  }
  EXPECT_EQ(StepOf("a"), 1);
}

TEST_F(KeptFilesTest, ARunThatWasKilledWhileItMadeItsFilesBegins) {
  GoOn("a", /*steps=*/0);
  fs::remove(File("a", "optimizer", 0));
  fs::remove(File("a", "parameters", 1));
  EXPECT_EQ(StepOf("a"), 0);
  GoOn("a", /*steps=*/2);
  EXPECT_EQ(StepOf("a"), 2);
}

TEST_F(KeptFilesTest, ALostFileIsNamedAndNothingIsMadeInItsPlace) {
  for (const int steps : {1, 3}) {
    fs::remove_all(root_);
    GoOn("a", steps);
    fs::remove(File("a", "parameters", 1));
    EXPECT_THAT(Opened("a"), AllRefuse("rank 1: ", "is not there",
                                       File("a", "parameters", 1),
                                       absl::StrCat("step ", steps)));
    EXPECT_FALSE(fs::exists(File("a", "parameters", 1)));
  }
}

TEST_F(KeptFilesTest, AnOlderFileIsNamed) {
  GoOn("a", /*steps=*/1);
  CopyRun("a", "old");
  GoOn("a", /*steps=*/3);
  Copy(File("old", "optimizer", 1), File("a", "optimizer", 1));
  EXPECT_THAT(Opened("a"), AllRefuse("rank 1: ", "step 1", "step 4"));
}

// A rank may be one commit ahead at any time, even in its first commit after it
// has gone on or back.
TEST_F(KeptFilesTest, AllGoBackToTheLastStageThatEveryFileHas) {
  GoOn("a", /*steps=*/2);
  for (int kill = 0; kill < 3; ++kill) {
    ASSERT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(KeptFiles kept, Open("a", world));
      return world.rank() == kill % 2 ? Commit(kept) : absl::OkStatus();
    }));
    EXPECT_EQ(StepOf("a"), 2);
  }
  GoOn("a", /*steps=*/1);
  EXPECT_EQ(StepOf("a"), 3);
}

}  // namespace
}  // namespace fsdp::testing
