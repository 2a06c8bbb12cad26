#include "benchmarks/residual_mlp.h"

#include <ATen/ops/gelu.h>

#include <memory>

#include "fsdp/model/forward.h"

namespace fsdp {

ResidualBlockImpl::ResidualBlockImpl()
    : fc(register_module("fc", torch::nn::Linear(kDim, 4 * kDim))),
      out(register_module("out", torch::nn::Linear(4 * kDim, kDim))) {}

at::Tensor ResidualBlockImpl::forward(const at::Tensor& x) {
  return x + out->forward(at::gelu(fc->forward(x)));
}

ResidualMlpImpl::ResidualMlpImpl()
    : blocks(register_module("blocks", torch::nn::ModuleList())),
      head(register_module("head", torch::nn::Linear(kDim, kDim))) {
  for (int i = 0; i < kBlocks; ++i) {
    blocks->push_back(std::make_shared<ResidualBlockImpl>());
  }
}

at::Tensor ResidualMlpImpl::forward(const at::Tensor& x) {
  at::Tensor y = x;
  for (const auto& block : *blocks) {
    y = Forward(*block->as<ResidualBlockImpl>(), y);
  }
  return head->forward(y);
}

at::Tensor ReconstructionLoss(const at::Tensor& output, const at::Tensor& x) {
  return (output - x).square().mean();
}

}  // namespace fsdp
