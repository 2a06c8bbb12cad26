// usage: dcp_training FOLDER OPTIMIZER [torchtitan]
//
// Trains a small model on three ranks, hands it to torch.distributed.checkpoint
// in FOLDER, goes on, and prints the losses from there, one a line.
// check_with_python.py has the same model. OPTIMIZER: AdamW, Adam, SGD.
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_error.h"
#include "checkpoint/dcp_files.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"

namespace fsdp::checkpoint::testing {
namespace {

constexpr int kRanks = 3;
constexpr int kSteps = 5;

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

absl::Status Train(const std::shared_ptr<comm::Communicator>& ranks,
                   const std::string& folder, const std::string& name,
                   bool torchtitan) {
  namespace nn = torch::nn;
  nn::Sequential net(nn::Linear(nn::LinearOptions(7, 5)), nn::Tanh(),
                     nn::Linear(nn::LinearOptions(5, 3).bias(false)));
  auto model = ValueOrThrow(FullyShard(net, ranks, Options()));
  auto optimizer = ValueOrThrow(MakeOptimizer(name, model->Parameters()));
  TrainingRun run;
  run.model = model.get();
  run.optimizer = optimizer.get();
  for (int step = 0; step < 2 * kSteps; ++step) {
    if (step == kSteps) {
      ExportDcpOptions options;
      options.torchtitan = torchtitan;
      ThrowIfError(ExportDcp(folder, run, options));
    }
    const at::Tensor rows = torch::sin(torch::arange(14) * 0.7 + step);
    const at::Tensor loss = model->forward(rows.view({2, 7})).square().mean();
    optimizer->zero_grad();
    loss.backward();
    optimizer->step();
    if (ranks->rank() == 0 && step >= kSteps) {
      std::printf("%.9g\n", loss.item<double>());
    }
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace fsdp::checkpoint::testing

int main(int argc, char** argv) {
  if (argc < 3 || argc > 4) {
    std::fputs("usage: dcp_training FOLDER OPTIMIZER [torchtitan]\n", stderr);
    return 2;
  }
  const absl::Status status = fsdp::comm::testing::RunAllRanks(
      fsdp::checkpoint::testing::kRanks, [&](fsdp::comm::Communicator& world) {
        torch::manual_seed(3);
        return fsdp::checkpoint::testing::Train(
            std::shared_ptr<fsdp::comm::Communicator>(
                &world, [](fsdp::comm::Communicator*) {}),
            argv[1], argv[2], argc == 4);
      });
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}
