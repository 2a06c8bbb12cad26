#include "testing/simulation/optimizers.h"

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <utility>
#include <vector>

#include "fsdp/optim/fused_optimizer.h"

namespace fsdp::simulation {

std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(
    const Training& training, std::vector<at::Tensor> parameters) {
  if (training.optimizer == Optimizer::kSgd) {
    const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
    if (training.fused) {
      return std::make_unique<FusedSGD>(std::move(parameters), options);
    }
    return std::make_unique<torch::optim::SGD>(std::move(parameters), options);
  }
  const auto options = torch::optim::AdamWOptions(0.01);
  if (training.fused) {
    return std::make_unique<FusedAdamW>(std::move(parameters), options);
  }
  return std::make_unique<torch::optim::AdamW>(std::move(parameters), options);
}

}  // namespace fsdp::simulation
