// The model of benchmarks of offload: units of two square matrices each.
#ifndef BENCHMARKS_PAIRS_H_
#define BENCHMARKS_PAIRS_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>

#include "fsdp/model/forward.h"

namespace fsdp {

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

class PairsImpl : public torch::nn::Module {
 public:
  PairsImpl(int units, int64_t dim)
      : pairs_(register_module("pairs", torch::nn::ModuleList())) {
    for (int i = 0; i < units; ++i) {
      pairs_->push_back(std::make_shared<PairImpl>(dim));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (const auto& pair : *pairs_) y = Forward(*pair->as<PairImpl>(), y);
    return y;
  }

 private:
  torch::nn::ModuleList pairs_;
};

}  // namespace fsdp

#endif  // BENCHMARKS_PAIRS_H_
