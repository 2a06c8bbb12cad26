// Models that know nothing of units, trained and compared with plain ones.
#ifndef FSDP_TESTS_MODELS_TRANSPARENT_TRAINING_H_
#define FSDP_TESTS_MODELS_TRANSPARENT_TRAINING_H_

#include <ATen/ops/ones.h>
#include <torch/nn/modules/normalization.h>

#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/training_check.h"

namespace fsdp::testing::transparent_nets {

inline constexpr int64_t kDim = 5;

template <typename... Units>
Options Transparent() {
  Options options;
  options.transparent = true;
  options.wrap_policy = WrapModules<Units...>();
  return options;
}

template <typename Net>
Training<Net> TrainingOf(Options options) {
  Training<Net> training;
  training.options = std::move(options);
  training.make_net = Filled<Net>;
  return training;
}

template <typename Net>
void ExpectTrainsAsPlain(const Training<Net>& training) {
  for (int world_size : {1, 2, 3}) {
    EXPECT_OK(RunAllRanks(world_size,
                          [&](Communicator& communicator) {
                            return CheckTraining(communicator, training);
                          }))
        << world_size << " ranks";
  }
}

template <typename Net, typename... Units>
void ExpectTrainsAsPlain() {
  ExpectTrainsAsPlain(TrainingOf<Net>(Transparent<Units...>()));
}

class Mlp : public torch::nn::Module {
 public:
  Mlp()
      : first(register_module("first", Linear(kDim, kDim))),
        second(register_module("second", Linear(kDim, kDim))),
        third(register_module("third", Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    return third->forward(second->forward(first->forward(x).tanh()).tanh());
  }
  Linear first, second, third;
};

// A unit with its own parameters around, between and after other units.
class Layer : public torch::nn::Module {
 public:
  Layer()
      : before(register_module(
            "before",
            torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})))),
        up(register_module("up", Linear(kDim, 2 * kDim))),
        down(register_module("down", Linear(2 * kDim, kDim))),
        after(register_module(
            "after",
            torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = up->forward(before->forward(x)).relu();
    return after->forward(x + down->forward(hidden));
  }
  torch::nn::LayerNorm before;
  Linear up, down;
  torch::nn::LayerNorm after;
};

class Nested : public torch::nn::Module {
 public:
  Nested()
      : embed(register_parameter("embed", at::ones({kDim}))),
        first(register_module("first", std::make_shared<Layer>())),
        second(register_module("second", std::make_shared<Layer>())),
        scale(register_parameter("scale", at::ones({kDim}))) {}
  at::Tensor forward(const at::Tensor& x) {
    return second->forward(first->forward(x * embed)) * scale;
  }
  at::Tensor embed;
  std::shared_ptr<Layer> first, second;
  at::Tensor scale;
};

}  // namespace fsdp::testing::transparent_nets

#endif  // FSDP_TESTS_MODELS_TRANSPARENT_TRAINING_H_
