#include "checkpoint/checkpointer.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/files/file_system.h"
#include "base/files/testing/forwarding_file_system.h"
#include "base/files/testing/real_files.h"
#include "base/testing/status_matchers.h"
#include "base/testing/warnings.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/commit/testing/save_files.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/training_step.h"
#include "fsdp/testing/toy_model.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::testing::BlockUnits;
using ::fsdp::testing::EmptyFolder;
using ::fsdp::testing::FreePath;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::ReadFilesBelow;
using ::fsdp::testing::ReadWholeFile;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kDim = 5;
constexpr int kBlocks = 2;

using Model = FullyShardedDataParallel<::fsdp::testing::NetImpl>;
using Optimizer = torch::optim::AdamW;

absl::StatusOr<std::unique_ptr<Checkpointer>> OpenIn(
    const std::string& folder, Communicator& world,
    const CheckpointerOptions& options = CheckpointerOptions()) {
  return Checkpointer::Open(folder, Unowned(world), options);
}

struct Training {
  static absl::StatusOr<Training> Make(Communicator& world, int seed,
                                       const Options& options = BlockUnits()) {
    Training training;
    FSDP_ASSIGN_OR_RETURN(Model model, FullyShard(MakeNet(kDim, kBlocks, seed),
                                                  Unowned(world), options));
    training.model = model;
    training.optimizer = std::make_unique<Optimizer>(
        training.model->Parameters(), torch::optim::AdamWOptions(0.01));
    return training;
  }

  // Takes a step whose values do not depend on how many ranks there are:
  // gradients are functions of names and elements.
  void StepAlike(int step) {
    for (const TensorRange& named : model->Ranges()) {
      at::Tensor gradient =
          at::arange(named.begin, named.begin + named.values.numel(),
                     named.values.options().requires_grad(false));
      gradient = (gradient * 0.1 + step + named.name.size()).sin();
      named.values.mutable_grad() = gradient;
    }
    optimizer->step();
    optimizer->zero_grad();
  }

  TrainingRun AsRun() {
    TrainingRun run;
    run.model = model.get();
    run.optimizer = optimizer.get();
    run.random_state = false;  // threads have one generator together
    return run;
  }

  Model model{nullptr};
  std::unique_ptr<Optimizer> optimizer;
};

absl::Status SaveAlike(Communicator& world, const std::string& folder,
                       const CheckpointerOptions& options = {}) {
  FSDP_ASSIGN_OR_RETURN(Training training, Training::Make(world, /*seed=*/1));
  training.StepAlike(0);
  training.StepAlike(1);
  FSDP_ASSIGN_OR_RETURN(const auto checkpoints, OpenIn(folder, world, options));
  return checkpoints->Save(7, training.AsRun());
}

TEST(CheckpointerTest, FilesDoNotDependOnTheNumberOfRanks) {
  std::map<std::string, std::string> expected;
  for (const int ranks : {1, 2, 3, 4, 8}) {
    const std::string folder = FreePath("alike");
    ASSERT_OK(RunAllRanks(
        ranks, [&](Communicator& world) { return SaveAlike(world, folder); }));
    std::map<std::string, std::string> files =
        ReadFilesBelow(folder + "/step-7");
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(
          files.erase(absl::StrCat("ranks/rank-0000", rank, ".safetensors")),
          1);
    }
    files.erase("manifest.json");
    files.erase("training.json");  // has the number of ranks
    EXPECT_EQ(files.size(), 3);    // the model and two moments
    if (ranks == 1) expected = files;
    EXPECT_TRUE(files == expected) << ranks;
    EXPECT_EQ(ReadWholeFile(folder + "/latest"), "step-7\n");
  }
}

TEST(CheckpointerTest, AModuleWithoutRanks) {
  const std::string folder = FreePath("plain");
  ASSERT_OK(RunAllRanks(
      3, [&](Communicator& world) { return SaveAlike(world, folder); }));
  auto net = MakeNet(kDim, kBlocks, /*seed=*/3);
  Optimizer optimizer(net->parameters());
  TrainingRun run;
  run.model = net.get();
  run.optimizer = &optimizer;
  ASSERT_OK_AND_ASSIGN(const auto checkpoints,
                       Checkpointer::Open(folder, nullptr));
  ASSERT_OK_AND_ASSIGN(const auto step, checkpoints->LoadLatest(run));
  EXPECT_EQ(step, 7);
  // Saving again gives the same files.
  ASSERT_OK(checkpoints->Save(8, run));
  auto first = ReadFilesBelow(folder + "/step-7");
  auto second = ReadFilesBelow(folder + "/step-8");
  for (const char* name : {"model.safetensors", "optimizer/exp_avg.safetensors",
                           "optimizer/exp_avg_sq.safetensors"}) {
    EXPECT_TRUE(first.at(name) == second.at(name)) << name;
  }
  EXPECT_THAT(*checkpoints->Steps(), ElementsAre(7, 8));
}

TEST(CheckpointerTest, CastOnWrite) {
  std::map<std::string, std::string> files[2];
  const auto net = MakeNet(kDim, kBlocks, /*seed=*/2);
  std::vector<at::Tensor> values[2];
  for (const int casts : {0, 1}) {
    const std::string folder = FreePath("cast");
    CheckpointerOptions options;
    if (casts == 1) options.model_dtype = c10::kBFloat16;
    ASSERT_OK(RunAllRanks(2, [&](Communicator& world) {
      return SaveAlike(world, folder, options);
    }));
    files[casts] = ReadFilesBelow(folder + "/step-7");
    TrainingRun run;
    run.model = net.get();
    ASSERT_OK((*Checkpointer::Open(folder, nullptr))->Load(7, run));
    for (const at::Tensor& parameter : net->parameters()) {
      values[casts].push_back(parameter.detach().clone());
    }
  }
  EXPECT_THAT(files[1]["model.safetensors"],
              AllOf(HasSubstr("\"BF16\""), Not(HasSubstr("\"F32\""))));
  // The optimizer's states stay as they are.
  for (const char* name :
       {"optimizer/exp_avg.safetensors", "optimizer/exp_avg_sq.safetensors"}) {
    EXPECT_TRUE(files[1].at(name) == files[0].at(name)) << name;
  }
  for (size_t i = 0; i < values[0].size(); ++i) {
    EXPECT_TRUE(at::equal(values[1][i],
                          values[0][i].to(c10::kBFloat16).to(c10::kFloat)));
  }
}

TEST(CheckpointerTest, EntriesOfTheRunAndOfRanks) {
  const std::string folder = FreePath("entries");
  EXPECT_OK(RunAllRanks(3, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Training training, Training::Make(world, 1));
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints, OpenIn(folder, world));
    TrainingRun run = training.AsRun();
    run.entries["name"] = "Käfer";
    run.rank_entries["at"] = absl::StrCat("row ", world.rank());
    FSDP_RETURN_IF_ERROR(checkpoints->Save(1, run));
    run.entries.clear();
    run.rank_entries = {{"other", "x"}};
    FSDP_RETURN_IF_ERROR(checkpoints->Load(1, run));
    EXPECT_EQ(run.entries.at("name"), "Käfer");
    EXPECT_EQ(run.rank_entries.size(), 1);
    EXPECT_EQ(run.rank_entries.at("at"), absl::StrCat("row ", world.rank()));
    return absl::OkStatus();
  }));
}

TEST(CheckpointerTest, WhatDoesNotFitIsSaidByAllWithNothingChanged) {
  const std::string folder = FreePath("misfit");
  ASSERT_OK(RunAllRanks(
      2, [&](Communicator& world) { return SaveAlike(world, folder); }));
  const auto statuses = RunRanks(3, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        Model model,
        FullyShard(MakeNet(kDim, kBlocks + 1), Unowned(world), BlockUnits()));
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints, OpenIn(folder, world));
    TrainingRun run;
    run.model = model.get();
    return checkpoints->Load(7, run);
  });
  EXPECT_THAT(statuses,
              Each(StatusIs(absl::StatusCode::kInvalidArgument,
                            HasSubstr("missing: blocks.2.fc.weight"))));
}

TEST(CheckpointerTest, RefusalsOfOneRankAreThoseOfAll) {
  const std::string folder = FreePath("refusals");
  const auto statuses = RunRanks(3, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Training training, Training::Make(world, 1));
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints, OpenIn(folder, world));
    TrainingRun run = training.AsRun();
    FSDP_RETURN_IF_ERROR(checkpoints->Save(1, run));
    if (world.rank() == 1) run.model = nullptr;
    absl::Status failed = checkpoints->Save(2, run);
    run.model = training.model.get();
    // Nothing is left of the save, and all goes on.
    FSDP_RETURN_IF_ERROR(checkpoints->Save(2, run));
    return failed;
  });
  EXPECT_THAT(statuses, Each(StatusIs(absl::StatusCode::kInvalidArgument,
                                      HasSubstr("rank 1: Save(): the run has "
                                                "no model"))));
  EXPECT_TRUE(std::filesystem::exists(folder + "/step-2/manifest.json"));
}

TEST(CheckpointerTest, AModelOfOtherRanksIsRefused) {
  const std::string folder = FreePath("other_ranks");
  const auto statuses = RunRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Training training, Training::Make(world, 1));
    FSDP_ASSIGN_OR_RETURN(
        const auto checkpoints,
        Checkpointer::Open(absl::StrCat(folder, world.rank()), nullptr));
    TrainingRun run = training.AsRun();
    const absl::Status loaded = checkpoints->Load(1, run);
    EXPECT_EQ(loaded.code(), absl::StatusCode::kNotFound);
    return checkpoints->Save(1, run);
  });
  EXPECT_THAT(statuses, Each(StatusIs(absl::StatusCode::kInvalidArgument,
                                      HasSubstr("sharded over 2 ranks"))));
}

// The run has not trained as far as the step that is there already.
TEST(CheckpointerTest, TheFirstSaveRefusesAFolderOfAnotherRun) {
  const std::string folder = FreePath("another");
  const auto refused = StatusIs(absl::StatusCode::kAlreadyExists,
                                HasSubstr("has checkpoints up to step 20"));
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Training training, Training::Make(world, 1));
    TrainingRun run = training.AsRun();
    {
      FSDP_ASSIGN_OR_RETURN(const auto checkpoints, OpenIn(folder, world));
      FSDP_RETURN_IF_ERROR(checkpoints->Save(20, run));
    }
    {
      FSDP_ASSIGN_OR_RETURN(const auto checkpoints, OpenIn(folder, world));
      EXPECT_THAT(checkpoints->SaveAsync(10, run), refused);
      EXPECT_THAT(checkpoints->Save(10, run), refused);
      EXPECT_THAT(checkpoints->SaveAsync(20, run), refused);
      // The run may still go on from there.
      FSDP_RETURN_IF_ERROR(checkpoints->LoadLatest(run).status());
      FSDP_RETURN_IF_ERROR(checkpoints->SaveAsync(30, run));
      FSDP_RETURN_IF_ERROR(checkpoints->Wait());
    }
    // Nothing that it will save is there.
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints, OpenIn(folder, world));
    return checkpoints->Save(40, run);
  }));
  CheckpointerOptions options;
  options.overwrite = true;
  auto net = MakeNet(kDim, kBlocks);
  TrainingRun run;
  run.model = net.get();
  ASSERT_OK_AND_ASSIGN(const auto checkpoints,
                       Checkpointer::Open(folder, nullptr, options));
  EXPECT_OK(checkpoints->Save(10, run));
}

// The checkpoints of an earlier run are a line that was given up: this run
// keeps as many of its own as it is told.
TEST(CheckpointerTest, ARunThatOverwritesKeepsItsOwn) {
  const std::string folder = FreePath("overwrites");
  auto net = MakeNet(kDim, kBlocks);
  TrainingRun run;
  run.model = net.get();
  CheckpointerOptions options;
  options.overwrite = true;
  options.keep_last = 2;
  for (const std::vector<int64_t>& steps :
       {std::vector<int64_t>{98, 99, 100}, {10, 20, 30, 99}}) {
    ASSERT_OK_AND_ASSIGN(const auto checkpoints,
                         Checkpointer::Open(folder, nullptr, options));
    for (const int64_t step : steps) ASSERT_OK(checkpoints->Save(step, run));
    const std::vector<int64_t> kept = steps.front() == 98
                                          ? std::vector<int64_t>{99, 100}
                                          : std::vector<int64_t>{30, 99, 100};
    EXPECT_EQ(*checkpoints->Steps(), kept);
  }
}

// As a network file system that keeps a file somebody reads.
class BusyFolders : public fsdp::testing::ForwardingFileSystem {
 public:
  BusyFolders() : ForwardingFileSystem(RealFileSystem()) {}

  absl::Status RemoveFolder(const std::string& path) override {
    return busy ? absl::FailedPreconditionError(
                      absl::StrCat(path, ": Directory not empty"))
                : ForwardingFileSystem::RemoveFolder(path);
  }

  bool busy = true;
};

TEST(CheckpointerTest, ARunGoesOnWhereAnOldCheckpointCannotBeRemoved) {
  BusyFolders files;
  auto net = MakeNet(kDim, kBlocks);
  TrainingRun run;
  run.model = net.get();
  CheckpointerOptions options;
  options.keep_last = 1;
  options.layout = SaveLayout::kPerRank;
  options.files = &files;
  for (const CommitBy by : {CommitBy::kRename, CommitBy::kManifest}) {
    options.commit_by = by;
    const std::string folder = FreePath("busy");
    fsdp::testing::Warnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    for (const int64_t step : {1, 2, 3, 4, 5}) {
      // Step 1 is loaded before step 2 and stays; it can go after that.
      ASSERT_OK_AND_ASSIGN(const auto checkpoints,
                           Checkpointer::Open(folder, nullptr, options));
      ASSERT_OK(checkpoints->LoadLatest(run).status());
      files.busy = step < 5;
      ASSERT_OK(checkpoints->Save(step, run));
      EXPECT_EQ(checkpoints->Steps()->back(), step);
      EXPECT_EQ(*Exists(files, folder + "/step-1.deleted"),
                by == CommitBy::kRename && (step == 3 || step == 4));
    }
    EXPECT_THAT(warnings.text(),
                AllOf(HasSubstr("step 3 is saved, but older ones"),
                      HasSubstr(": Directory not empty")));
  }
}

// Returns what is said when a run goes on with schedulers of these settings
// from one that had 10 and 4.
std::string ToldOf(unsigned step_size, int64_t warm_up) {
  const std::string folder =
      FreePath(absl::StrCat("schedulers_", step_size, "_", warm_up));
  auto net = MakeNet(kDim, kBlocks);
  fsdp::testing::Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  for (const bool saves : {true, false}) {
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    torch::optim::StepLR steps(optimizer, saves ? 10 : step_size);
    const WarmUpCosineOptions options{saves ? 4 : warm_up, /*steps=*/20};
    WarmUpCosine cosine(optimizer, options);
    TrainingRun run;
    run.model = net.get();
    run.optimizer = &optimizer;
    run.schedulers = {&steps, &cosine};
    const auto checkpoints = *Checkpointer::Open(folder, nullptr);
    if (!saves) {
      EXPECT_EQ(*checkpoints->LoadLatest(run), 1);
      // The rate is the next step's, by the options of this scheduler.
      EXPECT_DOUBLE_EQ(optimizer.param_groups()[0].options().get_lr(),
                       0.1 * WarmUpCosine::At(1, options));
    }
    optimizer.step();
    cosine.step();
    // The warm-up goes on where it was.
    EXPECT_DOUBLE_EQ(optimizer.param_groups()[0].options().get_lr(),
                     0.1 * WarmUpCosine::At(saves ? 1 : 2, options));
    if (saves) {
      EXPECT_OK(checkpoints->Save(1, run));
    }
  }
  return warnings.text();
}

TEST(CheckpointerTest, SchedulersThatAreMadeOtherwiseAreTold) {
  EXPECT_EQ(ToldOf(10, 4), "");
  EXPECT_THAT(ToldOf(20, 4),
              AllOf(HasSubstr("step_size 10"), HasSubstr("step_size 20")));
  EXPECT_THAT(ToldOf(10, 5), HasSubstr("warm_up 4"));
}

// A run that has loaded an older step replaces those of the line that it has
// given up when it gets there, and goes on from its own.
TEST(CheckpointerTest, AnOlderStepBeginsANewLine) {
  const std::string folder = FreePath("line");
  auto net = MakeNet(kDim, kBlocks);
  TrainingRun run;
  run.model = net.get();
  CheckpointerOptions options;
  options.keep_last = 3;
  for (const int64_t step : {7, 8, 9}) {
    ASSERT_OK_AND_ASSIGN(const auto checkpoints,
                         Checkpointer::Open(folder, nullptr, options));
    ASSERT_OK(checkpoints->Save(step, run));
  }
  const std::string before =
      ReadWholeFile(folder + "/step-9/model.safetensors");
  {
    ASSERT_OK_AND_ASSIGN(const auto checkpoints,
                         Checkpointer::Open(folder, nullptr, options));
    ASSERT_OK(checkpoints->Load(7, run));
    net->parameters()[0].detach().fill_(5);
    ASSERT_OK(checkpoints->Save(8, run));
    // A checkpoint of this line is not replaced.
    EXPECT_EQ(checkpoints->Save(8, run).code(),
              absl::StatusCode::kAlreadyExists);
  }
  ASSERT_OK_AND_ASSIGN(const auto checkpoints,
                       Checkpointer::Open(folder, nullptr, options));
  net->parameters()[0].detach().fill_(6);
  EXPECT_EQ(*checkpoints->LoadLatest(run), 8);
  EXPECT_EQ(net->parameters()[0].min().item<float>(), 5);
  EXPECT_THAT(*checkpoints->Steps(), ElementsAre(7, 8, 9));
  ASSERT_OK(checkpoints->SaveAsync(9, run));
  ASSERT_OK(checkpoints->Wait());
  EXPECT_NE(ReadWholeFile(folder + "/step-9/model.safetensors"), before);
}

TEST(CheckpointerTest, WhatIsNotSavedStays) {
  const std::string folder = FreePath("saves");
  CheckpointerOptions options;
  options.saves = [](const std::string& name) {
    return absl::StrContains(name, "blocks.0.");
  };
  for (const int ranks : {2, 3}) {
    EXPECT_OK(RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(auto model,
                            FullyShard(MakeNet(kDim, kBlocks, /*seed=*/ranks),
                                       Unowned(world), BlockUnits()));
      FSDP_ASSIGN_OR_RETURN(const auto checkpoints,
                            OpenIn(folder, world, options));
      TrainingRun run;
      run.model = model.get();
      if (ranks == 2) return checkpoints->Save(1, run);
      FSDP_RETURN_IF_ERROR(checkpoints->Load(1, run));
      FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
      const auto saved = MakeNet(kDim, kBlocks, /*seed=*/2);
      const auto own = MakeNet(kDim, kBlocks, /*seed=*/3);
      for (const auto& item : own->named_parameters()) {
        const at::Tensor& expected = options.saves(item.key())
                                         ? saved->named_parameters()[item.key()]
                                         : item.value();
        if (!at::equal(dict[item.key()], expected)) {
          return absl::InternalError(item.key());
        }
      }
      return absl::OkStatus();
    }));
  }
  EXPECT_THAT(ReadWholeFile(folder + "/step-1/model.safetensors"),
              Not(HasSubstr("blocks.1.")));
}

TEST(CheckpointerTest, ADamagedFileIsNamed) {
  const std::string folder = FreePath("damaged");
  auto net = MakeNet(kDim, kBlocks);
  TrainingRun run;
  run.model = net.get();
  ASSERT_OK_AND_ASSIGN(const auto checkpoints,
                       Checkpointer::Open(folder, nullptr));
  ASSERT_OK(checkpoints->Save(1, run));
  for (const char* name :
       {"model.safetensors", "training.json", "ranks/rank-00000.safetensors"}) {
    const std::string path = absl::StrCat(folder, "/step-1/", name);
    const std::string good = ReadWholeFile(path);
    for (const size_t at : {size_t{0}, good.size() / 2, good.size() - 1}) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 4);
      std::ofstream(path, std::ios::binary) << bad;
      EXPECT_THAT(checkpoints->Load(1, run),
                  StatusIs(absl::StatusCode::kDataLoss, HasSubstr(name)))
          << name << at;
    }
    std::ofstream(path, std::ios::binary) << good;
  }
  EXPECT_OK(checkpoints->Load(1, run));
  // These bytes are sound and say nothing.
  FileSystem& files = RealFileSystem();
  const std::string step = folder + "/step-1";
  ASSERT_OK_AND_ASSIGN(const auto good, testing::Load(files, step));
  for (const char* name : {"training.json", "ranks/rank-00000.safetensors"}) {
    testing::Contents contents = good;
    contents[name][0] = 'x';
    ASSERT_OK_AND_ASSIGN(const Manifest manifest,
                         testing::WriteFiles(files, step, 1, contents));
    ASSERT_OK(
        ReplaceFile(files, step + "/manifest.json", FormatManifest(manifest)));
    EXPECT_THAT(checkpoints->Load(1, run).message(),
                HasSubstr(absl::StrCat(step, "/", name, ": ")));
  }
}

TEST(NewestStepTest, IsThatOfTheLatestOrNone) {
  const std::string folder = EmptyFolder("newest");
  EXPECT_EQ(*NewestStep(folder), std::nullopt);
  EXPECT_EQ(*NewestStep(folder + "/missing"), std::nullopt);
  for (const char* name : {"step-9", "step-10"}) {
    std::filesystem::create_directory(absl::StrCat(folder, "/", name));
    std::ofstream(absl::StrCat(folder, "/", name, "/manifest.json")) << "";
  }
  EXPECT_EQ(*NewestStep(folder), 10);
  // Or that from which a run went on.
  std::ofstream(folder + "/latest") << "step-9\n";
  EXPECT_EQ(*NewestStep(folder), 9);
  EXPECT_FALSE(NewestStep(folder + "/step-9/manifest.json").ok());
}

}  // namespace
}  // namespace fsdp::checkpoint
