// The optimizer of a simulated training, over shards or whole parameters.
#ifndef TESTING_SIMULATION_OPTIMIZERS_H_
#define TESTING_SIMULATION_OPTIMIZERS_H_

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "testing/simulation/scenario.h"

namespace fsdp::simulation {

std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(
    const Training& training, std::vector<at::Tensor> parameters);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_OPTIMIZERS_H_
