// The model of record_peft.py, of layers that can have adapters.
#ifndef ADAPTERS_TESTING_ADAPTED_NET_H_
#define ADAPTERS_TESTING_ADAPTED_NET_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include <cstdint>
#include <memory>

#include "adapters/linear.h"
#include "fsdp/options/options.h"

namespace fsdp::adapters::testing {

constexpr int64_t kDim = 16;
constexpr int64_t kClasses = 5;

// x + o_proj(tanh(q_proj(x)) * v_proj(x)).
class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl();
  at::Tensor forward(const at::Tensor& x);

  Linear q_proj, v_proj, o_proj;
};

// head(layers(x)): [rows, kDim] -> [rows, kClasses].
class NetImpl : public torch::nn::Module {
 public:
  NetImpl();
  at::Tensor forward(const at::Tensor& x);

  torch::nn::ModuleList layers;
  Linear head;
};

// With values that `seed` alone decides.
std::shared_ptr<NetImpl> MakeNet(uint64_t seed);

// Every BlockImpl a unit.
Options BlockUnits();

}  // namespace fsdp::adapters::testing

#endif  // ADAPTERS_TESTING_ADAPTED_NET_H_
