#include "fsdp/testing/toy_model.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/tanh.h>
#include <c10/core/GradMode.h>

#include "fsdp/model/forward.h"

namespace fsdp::testing {

BlockImpl::BlockImpl(int64_t dim)
    : fc(register_module("fc", torch::nn::Linear(dim, 2 * dim))),
      out(register_module("out", torch::nn::Linear(2 * dim, dim))) {}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  return x + out->forward(at::tanh(fc->forward(x)));
}

NetImpl::NetImpl(int64_t dim, int num_blocks)
    : embed(register_module("embed", torch::nn::Linear(dim, dim))),
      blocks(register_module("blocks", torch::nn::ModuleList())),
      head(register_module("head", torch::nn::Linear(dim, dim))) {
  for (int i = 0; i < num_blocks; ++i) {
    blocks->push_back(std::make_shared<BlockImpl>(dim));
  }
}

at::Tensor NetImpl::forward(const at::Tensor& x) {
  at::Tensor y = embed->forward(x);
  for (const std::shared_ptr<torch::nn::Module>& block : *blocks) {
    y = Forward(*block->as<BlockImpl>(), y);
  }
  return head->forward(y);
}

void FillParameters(torch::nn::Module& module, int seed) {
  c10::NoGradGuard no_grad;
  int index = seed;
  for (at::Tensor& parameter : module.parameters()) {
    const at::Tensor ramp =
        at::arange(parameter.numel(), parameter.options()) * 0.7 + ++index;
    parameter.copy_(ramp.sin().mul(0.3).view(parameter.sizes()));
  }
}

std::shared_ptr<NetImpl> MakeNet(int64_t dim, int num_blocks, int seed) {
  auto net = std::make_shared<NetImpl>(dim, num_blocks);
  FillParameters(*net, seed);
  return net;
}

at::Tensor Rows(int64_t begin, int64_t rows, int64_t dim) {
  return (at::arange(begin * dim, (begin + rows) * dim, at::kFloat) * 0.31)
      .cos()
      .view({rows, dim});
}

at::Tensor Loss(const at::Tensor& output, const at::Tensor& input) {
  return (output - input.tanh()).square().mean();
}

Options BlockUnits() { return UnitsOf<BlockImpl>(); }

std::shared_ptr<comm::Communicator> Unowned(comm::Communicator& communicator) {
  return {std::shared_ptr<void>(), &communicator};
}

}  // namespace fsdp::testing
