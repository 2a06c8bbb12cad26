#include "fsdp/testing/layered_net.h"

#include <ATen/ops/tanh.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace fsdp::testing {

using ::torch::nn::Linear;

Layer::Layer(LayerBody body)
    : fc(register_module("fc", Linear(kDim, 2 * kDim))),
      out(register_module("out", Linear(2 * kDim, kDim))),
      body_(std::move(body)) {}

at::Tensor Layer::forward(const at::Tensor& x) { return body_(*this, x); }

at::Tensor WholeLayer(Layer& layer, const at::Tensor& x) {
  return x + layer.out->forward(at::tanh(layer.fc->forward(x)));
}

Net::Net(const LayerBody& layer_body, NetBody body)
    : embed(register_module("embed", Linear(Layer::kDim, Layer::kDim))),
      head(register_module("head", Linear(Layer::kDim, Layer::kDim))),
      body_(std::move(body)) {
  for (int i = 0; i < kLayers; ++i) {
    layers.push_back(register_module(absl::StrCat("layer", i),
                                     std::make_shared<Layer>(layer_body)));
  }
}

at::Tensor Net::forward(const at::Tensor& x) {
  return head->forward(body_(*this, x));
}

}  // namespace fsdp::testing
