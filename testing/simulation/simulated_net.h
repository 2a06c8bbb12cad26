// A small model that takes simulated time to compute.
#ifndef TESTING_SIMULATION_SIMULATED_NET_H_
#define TESTING_SIMULATION_SIMULATED_NET_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace fsdp::simulation {

// Computes x + out(tanh(fc(x))). A rank that computes it lets others run in
// between, in forward and backward.
class SimulatedBlockImpl : public torch::nn::Module {
 public:
  explicit SimulatedBlockImpl(int64_t dim);
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear fc;
  torch::nn::Linear out;
};

// Computes head(blocks(embed(x))).
class SimulatedNetImpl : public torch::nn::Module {
 public:
  SimulatedNetImpl(int64_t dim, int num_blocks);
  at::Tensor forward(const at::Tensor& x);

  // Makes the next forward throw std::runtime_error(`text`) half-way.
  void FailNext(std::string text) { failure_ = std::move(text); }

  torch::nn::Linear embed;
  torch::nn::ModuleList blocks;
  torch::nn::Linear head;

 private:
  std::string failure_;
};

// Makes a net with fixed parameters.
std::shared_ptr<SimulatedNetImpl> MakeSimulatedNet(int64_t dim, int num_blocks);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_SIMULATED_NET_H_
