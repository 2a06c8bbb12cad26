// A small module with tied parameters, buffers and a container.
#ifndef FLAT_PARAM_TESTING_TIED_NET_H_
#define FLAT_PARAM_TESTING_TIED_NET_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>
#include <vector>

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

}  // namespace fsdp::flat_param::testing

#endif  // FLAT_PARAM_TESTING_TIED_NET_H_
