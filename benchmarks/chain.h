// Models of benchmarks: units that come one after the other.
#ifndef BENCHMARKS_CHAIN_H_
#define BENCHMARKS_CHAIN_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>

namespace fsdp {

// Each unit is made of `arguments`.
template <typename Unit, typename... Arguments>
std::shared_ptr<torch::nn::SequentialImpl> MakeChain(int units,
                                                     Arguments... arguments) {
  auto chain = std::make_shared<torch::nn::SequentialImpl>();
  for (int i = 0; i < units; ++i) {
    chain->push_back(std::make_shared<Unit>(arguments...));
  }
  return chain;
}

// A unit of two square matrices.
class PairImpl : public torch::nn::Module {
 public:
  explicit PairImpl(int64_t dim) {
    const auto plain = torch::nn::LinearOptions(dim, dim).bias(false);
    first_ = register_module("first", torch::nn::Linear(plain));
    second_ = register_module("second", torch::nn::Linear(plain));
  }

  at::Tensor forward(const at::Tensor& x) {
    return x + second_(first_(x).tanh());
  }

 private:
  torch::nn::Linear first_{nullptr}, second_{nullptr};
};

}  // namespace fsdp

#endif  // BENCHMARKS_CHAIN_H_
