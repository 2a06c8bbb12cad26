#include "benchmarks/residual_mlp.h"

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <memory>
#include <utility>
#include <vector>

#include "fsdp/forward.h"

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

FusedAdamW::FusedAdamW(std::vector<at::Tensor> parameters)
    : parameters_(std::move(parameters)) {
  for (const at::Tensor& p : parameters_) {
    means_.push_back(at::zeros_like(p.detach()));
    squares_.push_back(at::zeros_like(p.detach()));
    steps_.push_back(at::zeros({}));
  }
}

void FusedAdamW::Step() {
  c10::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    gradients.push_back(parameters_[i].grad());
    steps_[i].add_(1);
  }
  at::_fused_adamw_(parameters_, gradients, means_, squares_, {}, steps_,
                    /*lr=*/3e-4, 0.9, 0.999, /*weight_decay=*/0.01, 1e-8,
                    /*amsgrad=*/false, /*maximize=*/false);
  for (at::Tensor& p : parameters_) p.mutable_grad().reset();
}

}  // namespace fsdp
