#include "testing/simulation/simulated_net.h"

#include <ATen/ops/tanh.h>

#include <memory>
#include <stdexcept>

#include "absl/strings/string_view.h"
#include "fsdp/model/forward.h"
#include "fsdp/testing/toy_model.h"
#include "testing/simulation/simulation.h"

namespace fsdp::simulation {
namespace {

// Takes time where a rank computes; the oracle computes outside of time.
void Compute(absl::string_view what) {
  Simulation* const simulation = Simulation::Current();
  if (simulation == nullptr || simulation->process() == Simulation::kDriver) {
    return;
  }
  simulation->Event(what);
}

at::Tensor Computed(const at::Tensor& tensor) {
  if (tensor.requires_grad()) {
    tensor.register_hook([](const at::Tensor& gradient) {
      Compute("computes a gradient");
      return gradient;
    });
  }
  return tensor;
}

}  // namespace

SimulatedBlockImpl::SimulatedBlockImpl(int64_t dim)
    : fc(register_module("fc", torch::nn::Linear(dim, 2 * dim))),
      out(register_module("out", torch::nn::Linear(2 * dim, dim))) {}

at::Tensor SimulatedBlockImpl::forward(const at::Tensor& x) {
  Compute("computes a block");
  const at::Tensor inner = Computed(at::tanh(fsdp::Forward(*fc, x)));
  Compute("computes the rest of it");
  return x + fsdp::Forward(*out, inner);
}

SimulatedNetImpl::SimulatedNetImpl(int64_t dim, int num_blocks)
    : embed(register_module("embed", torch::nn::Linear(dim, dim))),
      blocks(register_module("blocks", torch::nn::ModuleList())),
      head(register_module("head", torch::nn::Linear(dim, dim))) {
  for (int i = 0; i < num_blocks; ++i) {
    blocks->push_back(std::make_shared<SimulatedBlockImpl>(dim));
  }
}

at::Tensor SimulatedNetImpl::forward(const at::Tensor& x) {
  at::Tensor y = Computed(fsdp::Forward(*embed, x));
  for (const std::shared_ptr<torch::nn::Module>& block : *blocks) {
    y = Computed(fsdp::Forward(*block->as<SimulatedBlockImpl>(), y));
  }
  if (!failure_.empty()) throw std::runtime_error(failure_);
  Compute("computes the head");
  return fsdp::Forward(*head, y);
}

std::shared_ptr<SimulatedNetImpl> MakeSimulatedNet(int64_t dim,
                                                   int num_blocks) {
  auto net = std::make_shared<SimulatedNetImpl>(dim, num_blocks);
  fsdp::testing::FillParameters(*net, /*seed=*/3);
  return net;
}

}  // namespace fsdp::simulation
