#include "checkpoint/testing/dcp_run.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/sin.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"

namespace fsdp::checkpoint::testing {
namespace {

constexpr int kRanks = 3;
constexpr int kSteps = 5;  // before the handover, and behind it

std::vector<torch::optim::OptimizerParamGroup> GroupsOf(
    std::vector<at::Tensor> parameters) {
  return {torch::optim::OptimizerParamGroup(std::move(parameters))};
}

absl::StatusOr<std::unique_ptr<torch::optim::Optimizer>> MakeOptimizer(
    const std::string& name, std::vector<at::Tensor> parameters) {
  if (name == "AdamW") {
    return std::make_unique<torch::optim::AdamW>(
        GroupsOf(std::move(parameters)),
        torch::optim::AdamWOptions(0.05).weight_decay(0.1).betas({0.8, 0.9}));
  }
  if (name == "Adam") {
    return std::make_unique<torch::optim::Adam>(
        GroupsOf(std::move(parameters)),
        torch::optim::AdamOptions(0.05).amsgrad(true));
  }
  if (name == "SGD") {
    return std::make_unique<torch::optim::SGD>(
        GroupsOf(std::move(parameters)),
        torch::optim::SGDOptions(0.05).momentum(0.9));
  }
  return absl::InvalidArgumentError(absl::StrCat("no optimizer ", name));
}

class Training {
 public:
  static absl::StatusOr<std::unique_ptr<Training>> Make(
      comm::Communicator& world, const std::string& optimizer) {
    namespace nn = torch::nn;
    torch::manual_seed(3);
    nn::Sequential net(nn::Linear(nn::LinearOptions(7, 5)), nn::Tanh(),
                       nn::Linear(nn::LinearOptions(5, 3).bias(false)));
    std::unique_ptr<Training> training(new Training);
    training->world_ =
        std::shared_ptr<comm::Communicator>(&world, [](comm::Communicator*) {});
    FSDP_ASSIGN_OR_RETURN(training->model_,
                          FullyShard(net, training->world_, Options()));
    FSDP_ASSIGN_OR_RETURN(
        training->optimizer_,
        MakeOptimizer(optimizer, training->model_->Parameters()));
    return training;
  }

  TrainingRun AsRun() {
    TrainingRun run;
    run.model = model_.get();
    run.optimizer = optimizer_.get();
    return run;
  }

  absl::StatusOr<std::unique_ptr<Checkpointer>> Open(
      const std::string& folder) {
    return Checkpointer::Open(folder, world_);
  }

  // The losses of steps from `first` on.
  std::vector<double> Steps(int first) {
    std::vector<double> losses;
    for (int step = first; step < first + kSteps; ++step) {
      const at::Tensor rows = at::sin(at::arange(14) * 0.7 + step);
      const at::Tensor loss =
          model_->forward(rows.view({2, 7})).square().mean();
      optimizer_->zero_grad();
      loss.backward();
      optimizer_->step();
      losses.push_back(loss.item<double>());
    }
    return losses;
  }

 private:
  Training() = default;

  std::shared_ptr<comm::Communicator> world_;
  FullyShardedDataParallel<torch::nn::SequentialImpl> model_ = nullptr;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

// `hand_over` is called on each rank; its losses are of those steps.
absl::StatusOr<std::vector<double>> Run(
    const std::string& optimizer,
    absl::FunctionRef<absl::Status(Training& training)> hand_over) {
  std::vector<double> losses;
  FSDP_RETURN_IF_ERROR(comm::testing::RunAllRanks(
      kRanks, [&](comm::Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<Training> training,
                              Training::Make(world, optimizer));
        FSDP_RETURN_IF_ERROR(hand_over(*training));
        std::vector<double> own = training->Steps(kSteps);
        if (world.rank() == 0) losses = std::move(own);
        return absl::OkStatus();
      }));
  return losses;
}

}  // namespace

absl::StatusOr<std::vector<double>> SaveAndGoOn(const DcpRun& run) {
  return Run(run.optimizer, [&run](Training& training) -> absl::Status {
    training.Steps(0);
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints, training.Open(run.folder));
    return checkpoints->Save(kSteps, training.AsRun());
  });
}

absl::StatusOr<std::vector<double>> LoadAndGoOn(const DcpRun& run) {
  return Run(run.optimizer, [&run](Training& training) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints, training.Open(run.folder));
    TrainingRun loaded = training.AsRun();
    FSDP_ASSIGN_OR_RETURN(const std::optional<int64_t> step,
                          checkpoints->LoadLatest(loaded));
    if (step == kSteps) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat(run.folder, " is at step ", step.value_or(0)));
  });
}

}  // namespace fsdp::checkpoint::testing
