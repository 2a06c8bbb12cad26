// A small module with tied parameters, buffers and a container, flattened nets,
// and what to compare them with.
#ifndef FLAT_PARAM_TESTING_TIED_NET_H_
#define FLAT_PARAM_TESTING_TIED_NET_H_

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/torch_status.h"
#include "flat_param/flatten_params_wrapper.h"

namespace fsdp::flat_param::testing {

inline constexpr int64_t kDim = 5;
// Tied parameters count once.
inline constexpr int kNumParameters = 9;
inline constexpr int64_t kNumElements = 3 * (25 + 5) + 2 * 5 + 5;

// A linear layer whose weight another layer shares.
class HeadImpl : public torch::nn::Cloneable<HeadImpl> {
 public:
  explicit HeadImpl(at::Tensor weight);
  void reset() override;  // a weight of its own
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;
  at::Tensor bias;
};

// head(blocks(tanh(norm(fc(x))))), with fc.weight = head.weight.
class TiedNetImpl : public torch::nn::Cloneable<TiedNetImpl> {
 public:
  TiedNetImpl();
  void reset() override;
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear fc{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Sequential blocks{nullptr};
  std::shared_ptr<HeadImpl> head;
};

// Makes a net whose values depend on `seed` only.
std::shared_ptr<TiedNetImpl> MakeTiedNet(int seed = 0);
void Fill(torch::nn::Module& module, int seed);

// Returns a fixed batch.
at::Tensor Input(int64_t rows = 3);

// Returns each distinct parameter once, as an optimizer needs them.
std::vector<at::Tensor> DistinctParameters(const torch::nn::Module& module);

inline FlattenParamsWrapper<TiedNetImpl> FlatNet(int seed = 0) {
  return ValueOrThrow(FlattenParams(MakeTiedNet(seed)));
}

// Selects parameters by the beginning of their names.
inline FlattenOptions Only(const std::string& prefix) {
  FlattenOptions options;
  options.select = [prefix](const std::string& name, const at::Tensor&) {
    return name.rfind(prefix, 0) == 0;
  };
  return options;
}

inline std::vector<std::string> Names(const torch::nn::Module& module) {
  return module.named_parameters().keys();
}

// Returns the gradient that goes with FlatValues().
inline at::Tensor FlatGradient(const torch::nn::Module& plain) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& parameter : DistinctParameters(plain)) {
    parts.push_back(parameter.grad().reshape({-1}));
  }
  return at::cat(parts);
}

// Returns the flat parameter that the parameters of `plain` make.
inline at::Tensor FlatValues(const torch::nn::Module& plain) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& parameter : DistinctParameters(plain)) {
    parts.push_back(parameter.detach().reshape({-1}));
  }
  return at::cat(parts);
}

}  // namespace fsdp::flat_param::testing

#endif  // FLAT_PARAM_TESTING_TIED_NET_H_
