// An average of the weights over ranks: against an average that is computed in
// double from gathered weights, in evaluation, and through a checkpoint.
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/files/testing/real_files.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/training_step.h"
#include "fsdp/testing/toy_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::checkpoint::testing::FreePath;
using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::testing::BlockUnits;
using ::fsdp::testing::Loss;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::NetImpl;
using ::fsdp::testing::Rows;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::HasSubstr;

constexpr int64_t kDim = 5;
constexpr int kBlocks = 2;
constexpr double kDecay = 0.75;

using Values = std::map<std::string, at::Tensor>;

// A run with an average on one rank.
struct Averaged {
  static absl::StatusOr<Averaged> Make(Communicator& world, int seed,
                                       const Options& options) {
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(MakeNet(kDim, kBlocks, seed),
                                                 Unowned(world), options));
    auto optimizer =
        std::make_unique<torch::optim::SGD>(model->Parameters(), 0.1);
    auto average = std::make_unique<WeightAverage>(model->Parameters());
    return Averaged{std::move(model), std::move(optimizer), std::move(average)};
  }

  absl::Status Step(Communicator& world, int step) {
    const at::Tensor x = Rows(step * 24 + world.rank() * 3, 3, kDim);
    FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
    optimizer->step();
    optimizer->zero_grad();
    return average->Update(kDecay);
  }

  absl::StatusOr<Values> Gathered() const {
    FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
    Values values;
    for (const auto& item : dict) values[item.key()] = item.value().clone();
    return values;
  }

  TrainingRun AsRun() {
    TrainingRun run;
    run.model = model.get();
    run.optimizer = optimizer.get();
    run.average = average.get();
    run.random_state = false;  // of all threads together
    return run;
  }

  FullyShardedDataParallel<NetImpl> model{nullptr};
  std::unique_ptr<torch::optim::SGD> optimizer;
  std::unique_ptr<WeightAverage> average;
};

void ExpectNear(const Values& actual, const Values& expected, double error) {
  EXPECT_EQ(actual.size(), expected.size());
  for (const auto& [name, value] : expected) {
    const auto found = actual.find(name);
    if (found == actual.end()) {
      ADD_FAILURE() << name << " is missing";
      continue;
    }
    const double largest =
        (found->second.to(at::kDouble) - value).abs().max().item<double>();
    EXPECT_LE(largest, error) << name;
  }
}

// Steps 0 to 2, and what the average of their weights is.
absl::StatusOr<Values> TrainThree(Communicator& world, Averaged& run) {
  Values expected;
  for (int step = 0; step < 3; ++step) {
    FSDP_RETURN_IF_ERROR(run.Step(world, step));
    FSDP_ASSIGN_OR_RETURN(const Values weights, run.Gathered());
    for (const auto& [name, value] : weights) {
      const at::Tensor now = value.to(at::kDouble);
      at::Tensor& mean = expected[name];
      mean = step == 0 ? now : kDecay * mean + (1 - kDecay) * now;
    }
  }
  return expected;
}

Options With(ShardingStrategy strategy) {
  Options options = BlockUnits();
  options.unit.strategy = strategy;
  return options;
}

TEST(AverageTest, IsWhatIsEvaluated) {
  for (const ShardingStrategy strategy :
       {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp,
        ShardingStrategy::kNoShard}) {
    EXPECT_OK(RunAllRanks(3, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(Averaged run,
                            Averaged::Make(world, 1, With(strategy)));
      FSDP_ASSIGN_OR_RETURN(const Values expected, TrainThree(world, run));
      FSDP_ASSIGN_OR_RETURN(const Values weights, run.Gathered());
      const at::Tensor x = Rows(1000, 4, kDim);
      const c10::NoGradGuard no_grad;
      const at::Tensor trained = run.model->forward(x).clone();
      at::Tensor averaged;
      FSDP_RETURN_IF_ERROR(run.average->InModel([&]() -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(const Values inside, run.Gathered());
        ExpectNear(inside, expected, 1e-6);
        averaged = run.model->forward(x).clone();
        return absl::OkStatus();
      }));
      const auto plain = MakeNet(kDim, kBlocks, 2);
      for (const auto& item : plain->named_parameters()) {
        item.value().copy_(expected.at(item.key()));
      }
      EXPECT_LE((plain->forward(x) - averaged).abs().max().item<double>(),
                1e-5);
      EXPECT_GT((trained - averaged).abs().max().item<double>(), 1e-4);
      EXPECT_TRUE(at::equal(run.model->forward(x), trained));
      FSDP_ASSIGN_OR_RETURN(const Values back, run.Gathered());
      ExpectNear(back, weights, 0);
      return absl::OkStatus();
    }));
  }
}

TEST(AverageTest, GoesOnFromACheckpoint) {
  const std::string folder = FreePath("average");
  Values saved;  // the average, of rank 0
  EXPECT_OK(RunAllRanks(3, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        Averaged run,
        Averaged::Make(world, 1, With(ShardingStrategy::kFullShard)));
    FSDP_RETURN_IF_ERROR(TrainThree(world, run).status());
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints,
                          Checkpointer::Open(folder, Unowned(world)));
    FSDP_RETURN_IF_ERROR(checkpoints->SaveAsync(3, run.AsRun()));
    FSDP_RETURN_IF_ERROR(run.average->InModel([&]() -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(Values average, run.Gathered());
      if (world.rank() == 0) saved = std::move(average);
      EXPECT_THAT(checkpoints->Save(4, run.AsRun()),
                  StatusIs(absl::StatusCode::kFailedPrecondition,
                           HasSubstr("InModel()")));
      return absl::OkStatus();
    }));
    return checkpoints->Wait();
  }));
  for (const int ranks : {1, 2, 5}) {
    EXPECT_OK(RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(
          Averaged run,
          Averaged::Make(world, 2, With(ShardingStrategy::kShardGradOp)));
      FSDP_ASSIGN_OR_RETURN(const auto checkpoints,
                            Checkpointer::Open(folder, Unowned(world)));
      TrainingRun all = run.AsRun();
      // With an average of other weights, and with none so far.
      if (ranks == 2) FSDP_RETURN_IF_ERROR(run.average->Update(kDecay));
      FSDP_RETURN_IF_ERROR(checkpoints->LoadLatest(all).status());
      FSDP_ASSIGN_OR_RETURN(const Values weights, run.Gathered());
      FSDP_RETURN_IF_ERROR(run.average->InModel([&]() -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(const Values average, run.Gathered());
        ExpectNear(average, saved, 0);
        return absl::OkStatus();
      }));
      Values expected;
      for (const auto& [name, value] : weights) {
        expected[name] = kDecay * saved.at(name).to(at::kDouble) +
                         (1 - kDecay) * value.to(at::kDouble);
      }
      FSDP_RETURN_IF_ERROR(run.average->Update(kDecay));
      return run.average->InModel([&]() -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(const Values average, run.Gathered());
        ExpectNear(average, expected, 1e-6);
        return absl::OkStatus();
      });
    }));
  }
}

TEST(AverageTest, ACheckpointWithoutOneSaysSo) {
  const std::string folder = FreePath("none");
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        Averaged run,
        Averaged::Make(world, 1, With(ShardingStrategy::kFullShard)));
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints,
                          Checkpointer::Open(folder, Unowned(world)));
    TrainingRun without = run.AsRun();
    without.average = nullptr;
    FSDP_RETURN_IF_ERROR(checkpoints->Save(1, without));
    TrainingRun all = run.AsRun();
    EXPECT_THAT(checkpoints->Load(1, all),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("no average of the weights")));
    FSDP_RETURN_IF_ERROR(checkpoints->Save(2, all));
    return checkpoints->Load(2, without);
  }));
}

}  // namespace
}  // namespace fsdp::checkpoint
