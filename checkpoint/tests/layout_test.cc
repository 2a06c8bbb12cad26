// SaveLayout::kPerRank: files of single ranks, for storage without random
// writes.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "base/files/file_system.h"
#include "base/files/testing/forwarding_file_system.h"
#include "base/files/testing/simulated_file_system.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/commit/save_layout.h"
#include "checkpoint/model_files.h"
#include "checkpoint/run/run.h"
#include "checkpoint/tests/sharded_training.h"
#include "checkpoint/tests/watched_file_system.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/optim/training_step.h"
#include "fsdp/testing/toy_model.h"
#include "tools/checkpoint/tool.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::testing::ObjectStoreMount;
using ::fsdp::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kMaxBytes = int64_t{1} << 24;
constexpr int64_t kMaxFileBytes = 300;  // of shared files: several

CheckpointerOptions OptionsFor(FileSystem& files, SaveLayout layout) {
  CheckpointerOptions options;
  options.files = &files;
  options.layout = layout;
  options.max_file_bytes = kMaxFileBytes;
  options.staging_bytes = 1 << 10;  // several times as much is written
  options.texts = {{"config.json", "{}"}, {"empty.txt", ""}};
  return options;
}

TrainingSetup SetupOf(ModelKind model) {
  TrainingSetup setup;
  setup.model = model;
  setup.units = model != ModelKind::kOdd;
  return setup;
}

// Saves step 1 of a run that has stepped once.
void SaveOn(int ranks, FileSystem& files, const std::string& root,
            SaveLayout layout, ModelKind model, bool async = false) {
  EXPECT_OK(RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const auto training,
                          ShardedTraining::Make(world, SetupOf(model)));
    FSDP_RETURN_IF_ERROR(training->Step(0).status());
    FSDP_ASSIGN_OR_RETURN(
        const auto checkpoints,
        Checkpointer::Open(root, Unowned(world), OptionsFor(files, layout)));
    const TrainingRun run = training->AsRun();
    FSDP_RETURN_IF_ERROR(async ? checkpoints->SaveAsync(1, run)
                               : checkpoints->Save(1, run));
    return checkpoints->Wait();
  }));
}

// The optimizer's states are in files of their own, as the model is.
TEST(LayoutTest, FilesHaveTheirRanksNames) {
  SimulatedFileSystem files;
  SaveOn(2, files, "/run", SaveLayout::kPerRank, ModelKind::kToy);
  ASSERT_OK_AND_ASSIGN(const auto names, files.List("/run/step-1"));
  for (const std::string& name : names) {
    EXPECT_FALSE(absl::StartsWith(name, "model")) << name;
  }
  EXPECT_THAT(names, AllOf(Contains("config.json"), Contains("empty.txt"),
                           Contains("training.json")));
  for (const int rank : {1, 2}) {
    EXPECT_THAT(
        names,
        Contains(HasSubstr(absl::StrCat("shard-0000", rank, "-model-00001"))));
    EXPECT_THAT(*files.List("/run/step-1/optimizer"),
                Contains(HasSubstr(
                    absl::StrCat("shard-0000", rank, "-exp_avg-00001"))));
  }
}

// The model's files in a folder, by name.
std::map<std::string, std::string> ModelFilesIn(FileSystem& files,
                                                const std::string& folder) {
  std::map<std::string, std::string> contents;
  const std::vector<std::string> names = *files.List(folder);
  for (const std::string& name : names) {
    if (!absl::StartsWith(name, "model")) continue;
    contents[name] = *ReadFile(files, JoinPath(folder, name), kMaxBytes);
  }
  return contents;
}

TEST(LayoutTest, ConsolidatedItIsTheSharedOne) {
  tool::ConsolidateOptions options;
  options.max_file_bytes = kMaxFileBytes;
  for (const int ranks : {1, 2, 3}) {
    for (const ModelKind model : {ModelKind::kOdd, ModelKind::kBatchNorm}) {
      SimulatedFileSystem files;
      SaveOn(ranks, files, "/shared", SaveLayout::kShared, model);
      SaveOn(ranks, files, "/run", SaveLayout::kPerRank, model);
      ASSERT_OK(tool::Consolidate(files, "/run", "/out", options));
      const auto expected = ModelFilesIn(files, "/shared/step-1");
      EXPECT_GT(expected.size(), 2);
      EXPECT_EQ(ModelFilesIn(files, "/out"), expected);
    }
  }
}

// What goes to files, by path.
class WriteLog {
 public:
  absl::Status Change(absl::string_view what, const std::string& path) {
    const absl::MutexLock lock(&mutex_);
    const std::string name = NameOf(path);
    if (what == "set the size of") resized_.push_back(name);
    if (what == "open") ++opened_[name];
    return absl::OkStatus();
  }
  void Write(const std::string& path, int64_t offset, int64_t bytes) {
    const absl::MutexLock lock(&mutex_);
    const std::string name = NameOf(path);
    EXPECT_EQ(offset, ends_[name]) << path;
    ends_[name] = offset + bytes;
  }

  // Once each, and no more than what was written.
  void ExpectWritten(const std::string& name, int64_t bytes) {
    const absl::MutexLock lock(&mutex_);
    EXPECT_EQ(ends_[name], bytes) << name;
    EXPECT_EQ(opened_[name], 1) << name;
    EXPECT_THAT(resized_, ::testing::Not(Contains(name)));
  }

 private:
  // In the checkpoint, of one that is being written.
  static std::string NameOf(const std::string& path) {
    const size_t folder = path.find(".incomplete-");
    return folder == path.npos ? path : path.substr(path.find('/', folder) + 1);
  }

  absl::Mutex mutex_;
  std::map<std::string, int64_t> ends_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, int> opened_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> resized_ ABSL_GUARDED_BY(mutex_);
};

TEST(LayoutTest, FilesAreWrittenFrontToBack) {
  for (const bool async : {false, true}) {
    SimulatedFileSystem base;
    WriteLog log;
    WatchedFileSystem files(
        base,
        [&log](absl::string_view what, const std::string& path) {
          return log.Change(what, path);
        },
        [&log](const std::string& path, int64_t offset, int64_t bytes) {
          log.Write(path, offset, bytes);
        });
    SaveOn(3, files, "/run", SaveLayout::kPerRank, ModelKind::kOdd, async);
    ASSERT_OK_AND_ASSIGN(const Manifest manifest,
                         ReadManifest(base, "/run/step-1"));
    EXPECT_THAT(*VerifyFiles(base, "/run/step-1", manifest, nullptr),
                IsEmpty());
    // Three ranks' models, two states of the optimizer and own values.
    EXPECT_GT(manifest.files.size(), 3 * 4);
    for (const auto& [name, sums] : manifest.files) {
      log.ExpectWritten(name, sums.bytes);
    }
  }
}

// A file of rank 2 of 3.
std::string FileOfLastRank(FileSystem& files) {
  const std::vector<std::string> names = *files.List("/run/step-1");
  for (const std::string& name : names) {
    if (absl::StartsWith(name, "shard-00003-model")) {
      return JoinPath("/run/step-1", name);
    }
  }
  return "none";
}

TEST(LayoutTest, AFileThatIsMissing) {
  SimulatedFileSystem files;
  SaveOn(3, files, "/run", SaveLayout::kPerRank, ModelKind::kToy);
  const std::string path = FileOfLastRank(files);
  ASSERT_OK(files.RemoveFile(path));
  const auto load = [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        const auto training,
        ShardedTraining::Make(world, SetupOf(ModelKind::kToy)));
    FSDP_ASSIGN_OR_RETURN(
        const auto checkpoints,
        Checkpointer::Open("/run", Unowned(world),
                           OptionsFor(files, SaveLayout::kPerRank)));
    TrainingRun run = training->AsRun();
    return checkpoints->Load(1, run);
  };
  EXPECT_THAT(RunRanks(2, load),
              Each(StatusIs(absl::StatusCode::kNotFound,
                            AllOf(HasSubstr("rank 0: "), HasSubstr(path)))));
}

TEST(LayoutTest, RanksHaveToAgree) {
  SimulatedFileSystem files;
  EXPECT_THAT(RunRanks(2,
                       [&](Communicator& world) -> absl::Status {
                         const SaveLayout layout = world.rank() == 0
                                                       ? SaveLayout::kPerRank
                                                       : SaveLayout::kShared;
                         FSDP_ASSIGN_OR_RETURN(
                             const auto checkpoints,
                             Checkpointer::Open("/run", Unowned(world),
                                                OptionsFor(files, layout)));
                         TrainingRun run;
                         torch::nn::Linear mine(3, 2);
                         run.model = mine.get();
                         return checkpoints->Save(1, run);
                       }),
              Each(StatusIs(absl::StatusCode::kInvalidArgument,
                            HasSubstr("\"files of each rank\" on rank 0"))));
  EXPECT_THAT(*files.List("/run"), Each(HasSubstr("libtorch_fsdp")));
}

// Without ranks; and files for LoadModel().
TEST(LayoutTest, OneProcess) {
  SimulatedFileSystem files;
  ASSERT_OK_AND_ASSIGN(
      const auto checkpoints,
      Checkpointer::Open("/run", nullptr,
                         OptionsFor(files, SaveLayout::kPerRank)));
  torch::nn::Linear saved(3, 2);
  TrainingRun run;
  run.model = saved.get();
  ASSERT_OK(checkpoints->Save(1, run));
  torch::nn::Linear loaded(3, 2);
  run.model = loaded.get();
  ASSERT_OK(checkpoints->Load(1, run));
  EXPECT_TRUE(loaded->weight.equal(saved->weight));
  torch::nn::Linear other(3, 2);
  LoadModelOptions options;
  options.files = &files;
  ASSERT_OK(LoadModel("/run/step-1", *other, options));
  EXPECT_TRUE(other->bias.equal(saved->bias));
  // No tensors at all.
  torch::nn::Module empty;
  run.model = &empty;
  ASSERT_OK(checkpoints->Save(2, run));
  EXPECT_OK(checkpoints->Load(2, run));
}

// The average lies beside it, in files of the same kind.
TEST(LayoutTest, AFolderIsLoadedAsTheModelNotAsItsAverage) {
  torch::nn::Linear saved(3, 2);
  WeightAverage average(saved->parameters());
  TrainingRun run;
  run.model = saved.get();
  run.average = &average;
  const torch::NoGradGuard no_grad;
  saved->weight.fill_(1);
  ASSERT_OK(average.Update(0.5));
  saved->weight.fill_(2);
  for (const SaveLayout layout : {SaveLayout::kPerRank, SaveLayout::kShared}) {
    SimulatedFileSystem files;
    CheckpointerOptions options = OptionsFor(files, layout);
    // The model is a file, its average, of twice as many bytes, has an index.
    options.model_dtype = at::kBFloat16;
    options.max_file_bytes = 24;
    ASSERT_OK_AND_ASSIGN(const auto checkpoints,
                         Checkpointer::Open("/run", nullptr, options));
    ASSERT_OK(checkpoints->Save(1, run));
    torch::nn::Linear other(3, 2);
    LoadModelOptions loading;
    loading.files = &files;
    ASSERT_OK(LoadModel("/run/step-1", *other, loading));
    EXPECT_TRUE(other->weight.equal(saved->weight)) << other->weight;
  }
}

// CommitBy::kManifest: runs on storage that renames, locks and writes over
// nothing.

constexpr char kRoot[] = "/run";

class ByManifestTest : public ::testing::Test {
 protected:
  CheckpointerOptions Options() {
    CheckpointerOptions options;
    options.files = &files_;
    options.layout = SaveLayout::kPerRank;
    options.commit_by = CommitBy::kManifest;
    options.staging_bytes = 1 << 10;  // several times as much is written
    return options;
  }

  absl::StatusOr<std::unique_ptr<Checkpointer>> Open(Communicator& world) {
    return Checkpointer::Open(kRoot, Unowned(world), Options());
  }

  // On so many ranks, of which this one has `other` options.
  std::vector<absl::Status> OpenWhereOne(int rank, int ranks,
                                         const CheckpointerOptions& other) {
    return RunRanks(ranks, [&](Communicator& world) {
      return Checkpointer::Open(kRoot, Unowned(world),
                                world.rank() == rank ? other : Options())
          .status();
    });
  }

  SimulatedFileSystem disk_;
  ObjectStoreMount files_{disk_};
};

// Each save waits for the one before, and the load for the last.
TEST_F(ByManifestTest, SavesInARowKeepWhatTheyAreTold) {
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        const auto training,
        ShardedTraining::Make(world, SetupOf(ModelKind::kOdd)));
    CheckpointerOptions options = Options();
    options.keep_last = 2;
    options.keep_every = 3;
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints,
                          Checkpointer::Open(kRoot, Unowned(world), options));
    Values last;
    for (int step = 1; step <= 6; ++step) {
      FSDP_RETURN_IF_ERROR(training->Step(step).status());
      FSDP_ASSIGN_OR_RETURN(last, training->Gather());
      FSDP_RETURN_IF_ERROR(checkpoints->SaveAsync(step, training->AsRun()));
    }
    FSDP_RETURN_IF_ERROR(training->Step(7).status());
    FSDP_RETURN_IF_ERROR(
        CheckLatest(world, *checkpoints, SetupOf(ModelKind::kOdd), 6, last));
    EXPECT_THAT(*checkpoints->Steps(), ElementsAre(3, 5, 6));
    return absl::OkStatus();
  }));
  EXPECT_THAT(*files_.List(kRoot),
              ElementsAre(HasSubstr("by-manifest"), HasSubstr("checkpoints"),
                          "latest", "step-3", "step-5", "step-6"));
}

// A save of a step that is there changes nothing of it, by no rank.
TEST_F(ByManifestTest, AStepThatIsThere) {
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        const auto training,
        ShardedTraining::Make(world, SetupOf(ModelKind::kOdd)));
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints, Open(world));
    FSDP_ASSIGN_OR_RETURN(const Values values, training->Gather());
    FSDP_RETURN_IF_ERROR(checkpoints->Save(1, training->AsRun()));
    FSDP_RETURN_IF_ERROR(training->Step(2).status());
    EXPECT_THAT(checkpoints->Save(1, training->AsRun()),
                StatusIs(absl::StatusCode::kAlreadyExists,
                         HasSubstr("/run/step-1 is there already")));
    return CheckLatest(world, *checkpoints, SetupOf(ModelKind::kOdd), 1,
                       values);
  }));
}

TEST_F(ByManifestTest, WhatCannotBe) {
  CheckpointerOptions wrong = Options();
  wrong.overwrite = true;
  EXPECT_THAT(Checkpointer::Open(kRoot, nullptr, wrong),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("overwrite with commit_by")));
  wrong.layout = SaveLayout::kShared;
  EXPECT_THAT(Checkpointer::Open(kRoot, nullptr, wrong),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("set layout to SaveLayout::kPerRank")));
  CheckpointerOptions renames = Options();
  renames.commit_by = CommitBy::kRename;
  EXPECT_THAT(OpenWhereOne(/*rank=*/1, /*ranks=*/2, renames),
              Each(StatusIs(absl::StatusCode::kInvalidArgument,
                            HasSubstr("commit_by differ between ranks"))));
  EXPECT_THAT(*disk_.List("/"), IsEmpty());
}

TEST_F(ByManifestTest, WhatOneRankRefusesAllRefuse) {
  CheckpointerOptions wrong = Options();
  wrong.texts["manifest.json"] = "{}";
  for (const int rank : {0, 2}) {
    EXPECT_THAT(OpenWhereOne(rank, /*ranks=*/3, wrong),
                Each(StatusIs(absl::StatusCode::kInvalidArgument,
                              HasSubstr("a checkpoint has a manifest.json of "
                                        "its own"))))
        << rank;
    EXPECT_THAT(*disk_.List("/"), IsEmpty());
  }
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
