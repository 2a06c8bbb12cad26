#include "checkpoint/tests/odd_net.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/MemoryFormat.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>

#include "fsdp/model/forward.h"
#include "fsdp/options/options.h"
#include "fsdp/testing/toy_model.h"

namespace fsdp::checkpoint::testing {

using ::fsdp::testing::BlockImpl;

OddNetImpl::OddNetImpl(int seed)
    : conv_(register_module(
          "conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 2)))),
      turned_(register_parameter("turned", at::empty({kWidth, 4}).t())),
      scale_(register_parameter("scale", at::empty({}))),
      empty_(register_parameter("empty", at::empty({0, 3}))),
      frozen_(register_parameter("frozen", at::empty({kWidth}), false)),
      unused_(register_parameter("unused", at::empty({3, 2}))),
      left_out_(register_parameter("left_out", at::empty({kWidth}))),
      ignored_(register_parameter("ignored", at::empty({kWidth}))),
      mean_(register_buffer("mean", at::zeros({2}))),
      count_(register_buffer("count", at::zeros({}, at::kLong))),
      blocks_(register_module("blocks", torch::nn::ModuleList())) {
  for (int i = 0; i < 2; ++i) {
    blocks_->push_back(std::make_shared<BlockImpl>(kWidth));
  }
  const c10::NoGradGuard no_grad;
  conv_->weight.set_data(
      conv_->weight.detach().to(at::MemoryFormat::ChannelsLast));
  fsdp::testing::FillParameters(*this, seed);
}

at::Tensor OddNetImpl::forward(const at::Tensor& x) {
  const auto dtype = scale_.scalar_type();
  {
    const c10::NoGradGuard no_grad;
    mean_.mul_(0.5).add_(x.sum().to(mean_.scalar_type()));
    count_.add_(x.size(0));
  }
  at::Tensor y = conv_->forward(x.to(dtype).view({-1, 3, 2, 2})).view({-1, 4});
  y = y.matmul(turned_) * scale_ + frozen_ + left_out_ + empty_.sum();
  y = y + ignored_.detach().to(dtype);
  for (const auto& block : *blocks_) y = Forward(*block->as<BlockImpl>(), y);
  return y;
}

void IgnoreWhatIsIgnored(Options& options) {
  options.ignore.parameter = [](const std::string& name, const at::Tensor&) {
    return name == "ignored";
  };
}

}  // namespace fsdp::checkpoint::testing
