#include "testing/gpt/trainer.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <signal.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "base/testing/check_that.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/launcher/launch_options.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/options/offload_options.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/gpt/batches.h"
#include "testing/gpt/model.h"
#include "testing/gpt/options.h"
#include "testing/gpt/trainable_model.h"

namespace gpt {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRefusedRanks;
using ::fsdp::testing::CheckThat;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr GptConfig kModel{/*vocab=*/37, /*dim=*/24, /*layers=*/3, /*heads=*/3,
                           /*seq=*/10};
// The batch of all ranks together.
constexpr BatchShape kShape{/*batch=*/4, /*seq=*/10};
constexpr int64_t kSteps = 12;
constexpr int64_t kFirstSteps = 7;

std::shared_ptr<Communicator> Unowned(Communicator& communicator) {
  return std::shared_ptr<Communicator>(std::shared_ptr<void>(), &communicator);
}

Gpt MakeGpt(uint64_t seed) {
  Gpt model(kModel);
  InitializeParameters(*model, seed);
  return model;
}

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
};

absl::StatusOr<TrainingResult> TrainOn(const Job& run,
                                       Communicator& communicator) {
  const std::shared_ptr<Communicator> ranks = Unowned(communicator);
  const TrainOptions& options = run.options;
  FSDP_ASSIGN_OR_RETURN(const auto checkpoints,
                        OpenCheckpoints(options, ranks));
  // A checkpoint has to replace these values.
  FSDP_ASSIGN_OR_RETURN(
      const std::unique_ptr<TrainableModel> model,
      MakeTrainable(options, MakeGpt(options.resume ? 99 : 3), ranks));
  SharedRows data(communicator);
  TrainerOptions trainer;
  trainer.steps = run.steps;
  trainer.saving.checkpoints = checkpoints.get();
  trainer.saving.every = options.save_every;
  trainer.saving.async = options.save_async;
  trainer.saving.resume = options.resume;
  return Train(trainer, *model, data, ranks);
}

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

TEST_F(ResumeTest, FromTheDiskOrWithoutSharding) {
  Job run;
  run.ranks = 2;
  const std::vector<double> expected = Unbroken(run);
  run.options.offload.parameters = run.options.offload.gradients =
      run.options.offload.optimizer = fsdp::Tier::kSsd;
  run.options.offload.directory = ::testing::TempDir();
  EXPECT_EQ(InTwoRuns(run, run), expected);
  EXPECT_EQ(InTwoRuns(run, Job{2}), expected) << "then in memory";
  Job replicated{2};
  replicated.options.sharding = fsdp::ShardingStrategy::kShardOptimizer;
  EXPECT_EQ(InTwoRuns(replicated, replicated), Unbroken(replicated));
  Job whole;
  whole.options.sharding = std::nullopt;
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

TEST_F(ResumeTest, CheckpointsAndExportsDescribeTheModel) {
  Job run;
  run.ranks = 2;
  run.steps = 1;
  run.options.save = folder_;
  run.options.keep_last = 1;
  run.options.model = kModel;
  ASSERT_OK(TrainAll(run).status());
  ASSERT_OK_AND_ASSIGN(const std::string text,
                       fsdp::ReadRegularFile(folder_ + "/step-1/config.json"));
  ASSERT_OK_AND_ASSIGN(const fsdp::Json config, fsdp::Json::Parse(text));
  EXPECT_EQ(config.Find("num_hidden_layers")->NumberOr(0), kModel.layers);

  run.options.resume = true;
  run.options.sharding = std::nullopt;
  EXPECT_THAT(TrainAll(run).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("--save with --sharding=none and 2 ranks")));

  TrainOptions options;
  options.export_dir = folder_;
  EXPECT_THAT(
      CheckExport(options, 2),
      StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("--export")));
  options.export_dir = folder_ + "/no/model";
  EXPECT_THAT(CheckExport(options, 2),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/no/model")));
  options.sharding = std::nullopt;
  EXPECT_THAT(
      CheckExport(options, 2),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--export with")));
}

absl::StatusOr<TrainingResult> TrainSharded(const TrainerOptions& options,
                                            const Gpt& model,
                                            Communicator& communicator) {
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<TrainableModel> sharded,
                        MakeTrainable({}, model, Unowned(communicator)));
  CountData data(kModel.vocab, kShape, communicator.rank());
  return Train(options, *sharded, data, Unowned(communicator));
}

TEST(TrainerTest, AllRanksStopAfterTheSameStep) {
  std::vector<std::vector<int64_t>> steps(3);
  ASSERT_OK(RunAllRanks(3, [&](Communicator& communicator) -> absl::Status {
    std::vector<int64_t>& mine = steps[communicator.rank()];
    TrainerOptions options;
    options.steps = kSteps;
    options.on_step = [&mine](int64_t step, double) { mine.push_back(step); };
    // One rank is told to stop, at its second step.
    options.signal = [&] {
      return communicator.rank() == 1 && mine.size() == 1 ? SIGTERM : 0;
    };
    FSDP_ASSIGN_OR_RETURN(TrainingResult result,
                          TrainSharded(options, MakeGpt(3), communicator));
    FSDP_RETURN_IF_ERROR(CheckThat(result.finished, false, "finished"));
    return CheckThat(fsdp::comm::ExitCodeOf(result.stopped), 128 + SIGTERM,
                     "exit code");
  }));
  EXPECT_THAT(steps, Each(ElementsAre(1, 2)));
}

// A weight becomes not finite on all ranks before the second step.
TEST(TrainerTest, ALossThatIsNotFiniteEndsTheRunBeforeTheOptimizersStep) {
  std::vector<std::vector<int64_t>> steps(2);
  const std::vector<absl::Status> ends =
      RunRefusedRanks(2, [&](Communicator& communicator) -> absl::Status {
        const Gpt model = MakeGpt(3);
        {
          const c10::NoGradGuard no_grad;
          model->parameters()[1].flatten()[0] =
              std::numeric_limits<float>::infinity();
        }
        TrainerOptions options;
        options.on_step = [&](int64_t step, double) {
          steps[communicator.rank()].push_back(step);
        };
        return TrainSharded(options, model, communicator).status();
      });
  EXPECT_THAT(ends, Each(StatusIs(absl::StatusCode::kFailedPrecondition,
                                  HasSubstr("is the first parameter with a "
                                            "value that is not finite"))));
  EXPECT_THAT(steps, Each(SizeIs(0)));
}

// A model that fails on one rank must not leave the others waiting.
class FailingModel final : public TrainableModel {
 public:
  at::Tensor Forward(const at::Tensor&) override {
    throw std::runtime_error("the cat sat on the cable");
  }
  absl::Status Backward(const at::Tensor&) override { return absl::OkStatus(); }
  std::vector<at::Tensor> OptimizerParameters() override { return {}; }
  torch::nn::Module& module() override { return module_; }

 private:
  torch::nn::Module module_;
};

TEST(TrainerTest, ErrorsNameTheStep) {
  FailingModel model;
  EXPECT_THAT(
      RunAllRanks(
          1,
          [&](Communicator& communicator) {
            CountData data(kModel.vocab, kShape, 0);
            return Train({}, model, data, Unowned(communicator)).status();
          }),
      StatusIs(absl::StatusCode::kUnknown,
               HasSubstr("step 1: forward: the cat sat on the cable")));
}

}  // namespace
}  // namespace gpt
