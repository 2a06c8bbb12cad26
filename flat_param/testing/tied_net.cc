#include "flat_param/testing/tied_net.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <utility>

namespace fsdp::flat_param::testing {

HeadImpl::HeadImpl(at::Tensor weight) : weight(std::move(weight)) {
  register_parameter("weight", this->weight);
  bias = register_parameter("bias", at::zeros({kDim}));
}

void HeadImpl::reset() {
  weight = register_parameter("weight", at::empty({kDim, kDim}));
  bias = register_parameter("bias", at::empty({kDim}));
}

at::Tensor HeadImpl::forward(const at::Tensor& x) {
  return at::linear(x, weight, bias);
}

TiedNetImpl::TiedNetImpl() { reset(); }

void TiedNetImpl::reset() {
  fc = register_module("fc", torch::nn::Linear(kDim, kDim));
  norm = register_module("norm", torch::nn::BatchNorm1d(kDim));
  blocks = register_module(
      "blocks", torch::nn::Sequential(torch::nn::Linear(kDim, kDim),
                                      torch::nn::Linear(kDim, kDim)));
  head = register_module("head", std::make_shared<HeadImpl>(fc->weight));
}

at::Tensor TiedNetImpl::forward(const at::Tensor& x) {
  const at::Tensor hidden = norm->forward(fc->forward(x)).tanh();
  return head->forward(blocks->forward(hidden).tanh());
}

std::shared_ptr<TiedNetImpl> MakeTiedNet(int seed) {
  auto net = std::make_shared<TiedNetImpl>();
  Fill(*net, seed);
  return net;
}

void Fill(torch::nn::Module& module, int seed) {
  c10::NoGradGuard no_grad;
  double phase = seed;
  for (const at::Tensor& parameter : module.parameters()) {
    const at::Tensor index = at::arange(parameter.numel(), at::kDouble);
    parameter.copy_(((index * 0.7 + phase).sin() * 0.5).view_as(parameter));
    phase += 1.3;
  }
}

at::Tensor Input(int64_t rows) {
  return (at::arange(rows * kDim, at::kFloat) * 0.37).cos().view({rows, kDim});
}

std::vector<at::Tensor> DistinctParameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& parameter : module.parameters()) {
    bool is_new = true;
    for (const at::Tensor& other : result) {
      is_new = is_new && !other.is_same(parameter);
    }
    if (is_new) result.push_back(parameter);
  }
  return result;
}

}  // namespace fsdp::flat_param::testing
