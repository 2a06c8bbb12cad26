// Models of benchmarks: units that come one after the other.
#ifndef BENCHMARKS_CHAIN_H_
#define BENCHMARKS_CHAIN_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>

#include "fsdp/model/forward.h"

namespace fsdp {

template <typename Unit>
class ChainImpl : public torch::nn::Module {
 public:
  // Each unit is made of `arguments`.
  template <typename... Arguments>
  explicit ChainImpl(int units, Arguments... arguments)
      : units_(register_module("units", torch::nn::ModuleList())) {
    for (int i = 0; i < units; ++i) {
      units_->push_back(std::make_shared<Unit>(arguments...));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (const auto& unit : *units_) {
      y = Forward(*unit->template as<Unit>(), y);
    }
    return y;
  }

 private:
  torch::nn::ModuleList units_;
};

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

using PairsImpl = ChainImpl<PairImpl>;

}  // namespace fsdp

#endif  // BENCHMARKS_CHAIN_H_
