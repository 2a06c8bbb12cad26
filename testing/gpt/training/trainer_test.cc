#include "testing/gpt/training/trainer.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <signal.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/check_that.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"
#include "comm/launcher/launch_options.h"
#include "comm/testing/run_ranks.h"
#include "comm/testing/run_refused_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "replicas/replicas.h"
#include "testing/gpt/data/batch.h"
#include "testing/gpt/data/count_data.h"
#include "testing/gpt/flags/options.h"
#include "testing/gpt/model/model.h"
#include "testing/gpt/model/trainable_model.h"
#include "testing/gpt/testing/plain_training.h"

namespace gpt {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRefusedRanks;
using ::fsdp::testing::CheckThat;
using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using testing::Optimizer;
using testing::PlainLosses;
using ::testing::SizeIs;

constexpr GptConfig kModel{/*vocab=*/37, /*dim=*/24, /*layers=*/3, /*heads=*/3,
                           /*seq=*/10};
constexpr BatchShape kShape{/*batch=*/2, /*seq=*/10};
constexpr int64_t kSteps = 10;
constexpr uint64_t kSeed = 3;

std::shared_ptr<Communicator> Unowned(Communicator& communicator) {
  return std::shared_ptr<Communicator>(std::shared_ptr<void>(), &communicator);
}

absl::StatusOr<TrainingResult> TrainSharded(const TrainerOptions& options,
                                            Communicator& communicator,
                                            bool recompute = false) {
  Gpt model(kModel);
  InitializeParameters(*model, kSeed);
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<TrainableModel> sharded,
                        MakeSharded(model, Unowned(communicator),
                                    Sharding::kFull, ComputeDtype::kFloat,
                                    /*offload=*/{}, recompute));
  CountData data(kModel.vocab, kShape, communicator.rank());
  return Train(options, *sharded, data, communicator);
}

class TrainerOracleTest : public ::testing::TestWithParam<int> {};

TEST_P(TrainerOracleTest, LossesAreThoseOfPlainTrainingOnAllBatches) {
  const int ranks = GetParam();
  TrainerOptions options;
  options.warmup = 3;
  options.steps = kSteps - options.warmup;
  TrainingResult result;  // of rank 0
  ASSERT_OK(RunAllRanks(ranks, [&](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(TrainingResult mine,
                          TrainSharded(options, communicator));
    if (communicator.rank() == 0) result = std::move(mine);
    return absl::OkStatus();
  }));
  EXPECT_THAT(result.step_seconds, SizeIs(options.steps));
  EXPECT_OK(result.stopped);
  const std::vector<double> plain =
      PlainLosses({kModel, kShape, ranks, kSteps, kSeed});
  ASSERT_THAT(result.mean_losses, SizeIs(kSteps));
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_NEAR(result.mean_losses[step], plain[step], 1e-5 * plain[step])
        << step;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, TrainerOracleTest,
                         ::testing::Values(1, 2, 3, 4));

TEST(TrainerTest, OneRankGivesTheBitsOfPlainTraining) {
  TrainerOptions options;
  options.steps = kSteps;
  for (const bool recompute : {false, true}) {
    std::vector<double> losses;
    ASSERT_OK(RunAllRanks(1, [&](Communicator& communicator) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(TrainingResult result,
                            TrainSharded(options, communicator, recompute));
      losses = result.own_losses;
      return absl::OkStatus();
    }));
    EXPECT_EQ(losses, PlainLosses({kModel, kShape, /*ranks=*/1, kSteps, kSeed,
                                   3e-4, Optimizer::kFused}))
        << recompute;
  }
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
                          TrainSharded(options, communicator));
    FSDP_RETURN_IF_ERROR(CheckThat(result.finished, false, "finished"));
    return CheckThat(fsdp::comm::ExitCodeOf(result.stopped), 128 + SIGTERM,
                     "exit code");
  }));
  EXPECT_THAT(steps, ::testing::Each(ElementsAre(1, 2)));
}

// A weight becomes not finite on all ranks before the second step.
TEST(TrainerTest, ALossThatIsNotFiniteEndsTheRunBeforeTheOptimizersStep) {
  std::vector<std::vector<int64_t>> steps(2);
  const std::vector<absl::Status> ends =
      RunRefusedRanks(2, [&](Communicator& communicator) -> absl::Status {
        Gpt model(kModel);
        InitializeParameters(*model, kSeed);
        {
          const c10::NoGradGuard no_grad;
          model->parameters()[1].flatten()[0] =
              std::numeric_limits<float>::infinity();
        }
        FSDP_ASSIGN_OR_RETURN(
            std::unique_ptr<TrainableModel> sharded,
            MakeSharded(model, Unowned(communicator), Sharding::kFull,
                        ComputeDtype::kFloat, /*offload=*/{},
                        /*recompute=*/false));
        CountData data(kModel.vocab, kShape, communicator.rank());
        TrainerOptions options;
        options.on_step = [&](int64_t step, double) {
          steps[communicator.rank()].push_back(step);
        };
        return Train(options, *sharded, data, communicator).status();
      });
  EXPECT_THAT(ends, ::testing::Each(StatusIs(
                        absl::StatusCode::kFailedPrecondition,
                        ::testing::HasSubstr("is the first parameter with a "
                                             "value that is not finite"))));
  EXPECT_THAT(steps, ::testing::Each(SizeIs(0)));
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

TEST(TrainerTest, OneReplicaGivesTheBitsOfNone) {
  TrainerOptions options;
  options.steps = kSteps;
  std::vector<std::pair<int64_t, int>> parts;
  std::vector<std::string> members;
  options.replica.join = [](fsdp::checkpoint::TrainingRun* run, int64_t steps,
                            int64_t done) {
    fsdp::ReplicaOptions joining;
    joining.steps = steps;
    joining.first_step = done;
    return fsdp::Replicas::Join(/*environment=*/{}, run, joining);
  };
  options.replica.on_part = [&parts](int64_t step, int part) {
    parts.emplace_back(step, part);
  };
  options.replica.on_members = [&members](int64_t step,
                                          const std::string& who) {
    members.push_back(absl::StrCat(step, ": ", who));
  };
  ASSERT_OK(RunAllRanks(1, [&](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const TrainingResult result,
                          TrainSharded(options, communicator));
    EXPECT_EQ(result.own_losses,
              PlainLosses({kModel, kShape, /*ranks=*/1, kSteps, kSeed, 3e-4,
                           Optimizer::kFused}));
    EXPECT_TRUE(result.finished);
    return absl::OkStatus();
  }));
  ASSERT_THAT(parts, SizeIs(kSteps));
  for (int64_t step = 0; step < kSteps; ++step) {
    EXPECT_EQ(parts[step], std::make_pair(step, 0));
  }
  EXPECT_THAT(members, ElementsAre("1: 0.0"));
}

TEST(TrainerTest, ErrorsNameTheStep) {
  FailingModel model;
  EXPECT_THAT(
      RunAllRanks(1,
                  [&](Communicator& communicator) {
                    CountData data(kModel.vocab, kShape, 0);
                    return Train({}, model, data, communicator).status();
                  }),
      fsdp::testing::StatusIs(
          absl::StatusCode::kUnknown,
          ::testing::HasSubstr("step 1: forward: the cat sat on the cable")));
}

TEST(TrainerTest, ValidationLossIsTheMeanOverAllRanks) {
  std::vector<Batch> batches;
  batches.reserve(2);
  for (int rank = 0; rank < 2; ++rank) {
    batches.push_back(CountData(kModel.vocab, kShape, rank).Next());
  }
  Gpt plain(kModel);
  InitializeParameters(*plain, kSeed);
  double expected = 0;
  for (const Batch& batch : batches) {
    expected += NextTokenLoss(plain->forward(batch.inputs), batch.targets)
                    .item<double>() /
                2;
  }
  ASSERT_OK(RunAllRanks(2, [&](Communicator& communicator) -> absl::Status {
    Gpt model(kModel);
    InitializeParameters(*model, kSeed);
    FSDP_ASSIGN_OR_RETURN(std::unique_ptr<TrainableModel> sharded,
                          MakeSharded(model, Unowned(communicator)));
    FSDP_ASSIGN_OR_RETURN(
        double loss,
        ValidationLoss(*sharded, {batches[communicator.rank()]}, communicator));
    return std::abs(loss - expected) < 1e-6
               ? absl::OkStatus()
               : absl::InternalError(absl::StrCat(loss));
  }));
}

}  // namespace
}  // namespace gpt
