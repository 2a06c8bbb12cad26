// Training that goes on from checkpoints.
#include <ATen/core/Tensor.h>
#include <signal.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/checkpointer.h"
#include "comm/communicator.h"
#include "comm/launcher/launch_options.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/options/offload_options.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/gpt/data/batch.h"
#include "testing/gpt/data/count_data.h"
#include "testing/gpt/flags/options.h"
#include "testing/gpt/model/model.h"
#include "testing/gpt/model/trainable_model.h"
#include "testing/gpt/training/checkpoints.h"
#include "testing/gpt/training/trainer.h"

namespace gpt {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr GptConfig kModel{/*vocab=*/37, /*dim=*/24, /*layers=*/3, /*heads=*/3,
                           /*seq=*/10};
// The batch of all ranks together.
constexpr BatchShape kShape{/*batch=*/4, /*seq=*/10};
constexpr int64_t kSteps = 12;
constexpr int64_t kFirstSteps = 7;

// Gives this rank its part of rows that do not depend on the number of ranks.
class SharedRows final : public BatchSource {
 public:
  explicit SharedRows(const Communicator& ranks)
      : all_(kModel.vocab, kShape, /*rank=*/0),
        rows_(kShape.batch / ranks.world_size()),
        first_(rows_ * ranks.rank()) {}

  Batch Next() override {
    const Batch all = all_.Next();
    return {all.inputs.narrow(0, first_, rows_),
            all.targets.narrow(0, first_, rows_)};
  }

 private:
  CountData all_;
  const int64_t rows_;
  const int64_t first_;
};

struct Job {
  int ranks = 1;
  int64_t steps = kSteps;
  TrainOptions options = {};
  std::function<int()> signal = nullptr;
};

absl::StatusOr<TrainingResult> TrainOn(const Job& run,
                                       Communicator& communicator) {
  const std::shared_ptr<Communicator> unowned(std::shared_ptr<void>(),
                                              &communicator);
  const TrainOptions& options = run.options;
  FSDP_ASSIGN_OR_RETURN(const auto checkpoints,
                        OpenCheckpoints(options, unowned));
  Gpt model(kModel);
  // A checkpoint has to replace these values.
  InitializeParameters(*model, options.resume ? 99 : 3);
  std::unique_ptr<TrainableModel> trained;
  if (options.sharding == Sharding::kNone) {
    trained = MakeUnsharded(std::move(model));
  } else {
    FSDP_ASSIGN_OR_RETURN(trained,
                          MakeSharded(model, unowned, options.sharding,
                                      options.precision, options.offload));
  }
  SharedRows data(communicator);
  TrainerOptions trainer;
  trainer.steps = run.steps;
  trainer.signal = run.signal;
  trainer.saving.checkpoints = checkpoints.get();
  trainer.saving.every = options.save_every;
  trainer.saving.async = options.save_async;
  trainer.saving.resume = options.resume;
  return Train(trainer, *trained, data, communicator);
}

// Returns the result of rank 0.
absl::StatusOr<TrainingResult> TrainAll(const Job& run) {
  TrainingResult result;
  FSDP_RETURN_IF_ERROR(
      RunAllRanks(run.ranks, [&](Communicator& ranks) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(TrainingResult mine, TrainOn(run, ranks));
        if (ranks.rank() == 0) result = std::move(mine);
        return absl::OkStatus();
      }));
  return result;
}

class ResumeTest : public ::testing::Test {
 protected:
  ResumeTest() { std::filesystem::remove_all(folder_); }

  // Returns the losses of the last steps, in two runs.
  std::vector<double> InTwoRuns(Job first, Job second) {
    std::filesystem::remove_all(folder_);
    first.options.save = folder_;
    first.steps = kFirstSteps;
    EXPECT_OK(TrainAll(first).status());
    second.options.save = folder_;
    second.options.resume = true;
    const absl::StatusOr<TrainingResult> result = TrainAll(second);
    EXPECT_OK(result.status());
    if (!result.ok()) return {};
    EXPECT_EQ(result->last_step, kSteps);
    return result->mean_losses;
  }

  std::vector<std::string> Saved() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      const std::string name = entry.path().filename();
      if (name.rfind("step-", 0) == 0) names.push_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  const std::string folder_ =
      absl::StrCat(::testing::TempDir(), "/trainer_resume_test");
};

std::vector<double> Unbroken(const Job& run) {
  const absl::StatusOr<TrainingResult> result = TrainAll(run);
  EXPECT_OK(result.status());
  if (!result.ok()) return {};
  EXPECT_THAT(result->mean_losses, SizeIs(kSteps));
  return {result->mean_losses.begin() + kFirstSteps, result->mean_losses.end()};
}

TEST_F(ResumeTest, TwoRunsHaveTheLossesOfOneToTheBit) {
  for (const int ranks : {1, 2}) {
    for (const bool async : {true, false}) {
      Job run;
      run.ranks = ranks;
      const std::vector<double> expected = Unbroken(run);
      run.options.save_async = async;
      run.options.save_every = 3;
      EXPECT_EQ(InTwoRuns(run, run), expected) << ranks << async;
      EXPECT_THAT(Saved(), ElementsAre("step-12", "step-3", "step-6", "step-7",
                                       "step-9"));
    }
  }
}

TEST_F(ResumeTest, WithEveryStrategyAndTier) {
  for (const Sharding sharding :
       {Sharding::kGradients, Sharding::kOptimizer, Sharding::kReplicated}) {
    Job run;
    run.ranks = 2;
    run.options.sharding = sharding;
    EXPECT_EQ(InTwoRuns(run, run), Unbroken(run)) << static_cast<int>(sharding);
  }
  Job run;
  run.ranks = 2;
  const std::vector<double> expected = Unbroken(run);
  run.options.offload.parameters = run.options.offload.gradients =
      run.options.offload.optimizer = fsdp::Tier::kSsd;
  run.options.offload.directory = ::testing::TempDir();
  EXPECT_EQ(InTwoRuns(run, run), expected);
  EXPECT_EQ(InTwoRuns(run, Job{2}), expected) << "then in memory";
  Job whole;
  whole.options.sharding = Sharding::kNone;
  EXPECT_EQ(InTwoRuns(whole, whole), Unbroken(whole));
}

TEST_F(ResumeTest, OnAnotherNumberOfRanks) {
  const std::vector<double> expected = Unbroken(Job{1});
  for (const auto& [before, after] :
       {std::pair(1, 2), std::pair(2, 1), std::pair(2, 4), std::pair(4, 2)}) {
    const std::vector<double> losses = InTwoRuns(Job{before}, Job{after});
    ASSERT_THAT(losses, SizeIs(expected.size())) << before << after;
    for (size_t i = 0; i < losses.size(); ++i) {
      EXPECT_NEAR(losses[i], expected[i], 1e-6 * expected[i])
          << before << after << ", " << i;
    }
  }
}

TEST_F(ResumeTest, WhatIsStoppedIsSaved) {
  Job run;
  run.ranks = 2;
  run.options.save = folder_;
  run.signal = [] { return SIGINT; };
  ASSERT_OK_AND_ASSIGN(const TrainingResult result, TrainAll(run));
  EXPECT_EQ(fsdp::comm::ExitCodeOf(result.stopped), 128 + SIGINT);
  EXPECT_EQ(result.last_step, 1);
  EXPECT_THAT(Saved(), ElementsAre("step-1"));
  // Nothing is left to do or to save.
  run.options.resume = true;
  run.steps = 1;
  ASSERT_OK_AND_ASSIGN(const TrainingResult done, TrainAll(run));
  EXPECT_THAT(done.mean_losses, SizeIs(0));
  EXPECT_THAT(Saved(), ElementsAre("step-1"));
}

TEST_F(ResumeTest, RefusesAFolderThatAnotherRunHasFilled) {
  Job run;
  run.ranks = 2;
  run.steps = 1;
  run.options.save = folder_;
  ASSERT_OK(TrainAll(run).status());
  EXPECT_THAT(TrainAll(run).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("the newest of step 1"),
                             HasSubstr("--resume"))));
  run.options.sharding = Sharding::kNone;
  EXPECT_THAT(TrainAll(run).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("--save with --sharding=none and 2 ranks")));
}

TEST_F(ResumeTest, CheckpointsAndExportsDescribeTheModel) {
  Job run;
  run.ranks = 2;
  run.steps = 1;
  run.options.save = folder_;
  run.options.keep_last = 1;
  run.options.model = kModel;
  ASSERT_OK(TrainAll(run).status());
  std::stringstream text;
  text << std::ifstream(folder_ + "/step-1/config.json").rdbuf();
  EXPECT_EQ(text.str(), ConfigJson(kModel));
  ASSERT_OK_AND_ASSIGN(const fsdp::Json config, fsdp::Json::Parse(text.str()));
  EXPECT_EQ(config.Find("num_hidden_layers")->NumberOr(0), kModel.layers);

  TrainOptions options;
  options.export_dir = folder_;
  EXPECT_THAT(
      CheckExport(options, 2),
      StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("--export")));
  options.export_dir = folder_ + "/no/model";
  EXPECT_THAT(CheckExport(options, 2),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/no/model")));
  options.sharding = Sharding::kNone;
  EXPECT_THAT(
      CheckExport(options, 2),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--export with")));
}

}  // namespace
}  // namespace gpt
