#include "adapters/testing/adapted_net.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/tanh.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>

#include "adapters/linear.h"
#include "fsdp/model/forward.h"
#include "fsdp/options/options.h"

namespace fsdp::adapters::testing {
namespace {

constexpr int64_t kWide = 24;
constexpr int kLayers = 2;

}  // namespace

BlockImpl::BlockImpl()
    : q_proj(register_module(
          "q_proj", Linear(torch::nn::LinearOptions(kDim, kWide).bias(false)))),
      v_proj(register_module("v_proj", Linear(kDim, kWide))),
      o_proj(register_module("o_proj", Linear(kWide, kDim))) {}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  return x + o_proj(at::tanh(q_proj(x)) * v_proj(x));
}

NetImpl::NetImpl()
    : layers(register_module("layers", torch::nn::ModuleList())),
      head(register_module("head", Linear(kDim, kClasses))) {
  for (int i = 0; i < kLayers; ++i) {
    layers->push_back(std::make_shared<BlockImpl>());
  }
}

at::Tensor NetImpl::forward(const at::Tensor& x) {
  at::Tensor y = x;
  for (const auto& layer : *layers) {
    y = Forward(*layer->as<BlockImpl>(), y);
  }
  return head(y);
}

std::shared_ptr<NetImpl> MakeNet(uint64_t seed) {
  auto net = std::make_shared<NetImpl>();
  const c10::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(seed);
  for (const at::Tensor& parameter : net->parameters()) {
    at::Tensor(parameter).normal_(0, 0.3, generator);
  }
  return net;
}

Options BlockUnits() {
  Options options;
  options.wrap_policy = WrapModules<BlockImpl>();
  return options;
}

}  // namespace fsdp::adapters::testing
