// The optimizers of a Program, over a plain model's parameters or over shards.
#ifndef FSDP_TESTING_PROGRAM_PROGRAM_OPTIMIZERS_H_
#define FSDP_TESTING_PROGRAM_PROGRAM_OPTIMIZERS_H_

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/model/sharded_model.h"
#include "fsdp/testing/program/program.h"

namespace fsdp::testing {

struct ProgramOptimizers {
  std::vector<std::unique_ptr<torch::optim::Optimizer>> all;
  // One step for StepInBackward() per optimizer.
  std::vector<ShardedModel::UnitStep> unit_steps;

  void ZeroGrad(bool set_to_none);
  void Step();
};

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Makes this library's fused optimizers if `sharded` and the program says so,
// else those of torch::optim. Names alone decide on groups.
ProgramOptimizers MakeOptimizers(const Program& program, bool sharded,
                                 const NamedTensors& tensors);

// Sets the learning rates from this step on.
void SetRates(int step, ProgramOptimizers& optimizers);

std::map<std::string, at::Tensor> StateTensors(
    const torch::optim::OptimizerParamState& state);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PROGRAM_PROGRAM_OPTIMIZERS_H_
