// A model whose modules are fixed and whose forward functions the test gives.
#ifndef FSDP_TESTING_LAYERED_NET_H_
#define FSDP_TESTING_LAYERED_NET_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace fsdp::testing {

class Layer;
using LayerBody = std::function<at::Tensor(Layer&, const at::Tensor&)>;

// Computes body(x); a unit for the test to wrap.
class Layer : public torch::nn::Module {
 public:
  static constexpr int64_t kDim = 5;

  explicit Layer(LayerBody body);
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear fc;   // kDim to 2 * kDim
  torch::nn::Linear out;  // 2 * kDim to kDim

 private:
  const LayerBody body_;
};

// Returns x + out(tanh(fc(x))).
at::Tensor WholeLayer(Layer& layer, const at::Tensor& x);

class Net;
using NetBody = std::function<at::Tensor(Net&, const at::Tensor&)>;

// Computes head(body(x)); the body calls the layers, and may call `embed`. The
// layers are named layer0, layer1 and so on.
class Net : public torch::nn::Module {
 public:
  static constexpr int kLayers = 3;

  Net(const LayerBody& layer_body, NetBody body);
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear embed;
  torch::nn::Linear head;
  std::vector<std::shared_ptr<Layer>> layers;

 private:
  const NetBody body_;
};

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_LAYERED_NET_H_
