// Models that know nothing of units, trained and compared with plain ones.
#ifndef FSDP_TESTS_MODELS_TRANSPARENT_TRAINING_H_
#define FSDP_TESTS_MODELS_TRANSPARENT_TRAINING_H_

#include <ATen/ops/ones.h>
#include <torch/nn/modules/normalization.h>

#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/training_task.h"

namespace fsdp::testing::transparent_nets {

inline constexpr int64_t kDim = 5;

// A training that both models do.
template <typename Net>
struct Training {
  Options options;
  int steps = 3;
  // Called on both before each step, on rank `rank` of the sharded model and on
  // the plain one before it sees the rows of that rank.
  std::function<void(Net&, int step, int rank)> before_forward = [](Net&, int,
                                                                    int) {};
};

// Checks losses, gradients by their effect on parameters, and the memory that
// is left after a step.
template <typename Net>
absl::Status CheckTraining(Communicator& communicator,
                           const Training<Net>& training) {
  const int ranks = communicator.world_size();
  const auto task_of = [&](Net& net) {
    TrainingTask task;
    task.steps = training.steps;
    // Decay shows a gradient of zeros instead of none, momentum the order of
    // steps.
    task.optimizer = Sgd(0.1, /*weight_decay=*/0.01);
    task.loss = [&training, &net, ranks](const TensorFunction& forward,
                                         int64_t part) {
      training.before_forward(net, static_cast<int>(part / ranks),
                              static_cast<int>(part % ranks));
      return forward(Rows(3 * part, 3, kDim)).square().mean();
    };
    return task;
  };
  FSDP_ASSIGN_OR_RETURN(
      FullyShardedDataParallel<Net> model,
      FullyShard(Filled<Net>(), Unowned(communicator), training.options));
  FSDP_ASSIGN_OR_RETURN(const TaskRecord actual,
                        RunSharded(task_of(*model->module()), model));
  const std::shared_ptr<Net> plain = Filled<Net>();
  return CheckSameRecord(actual, RunPlain(task_of(*plain), plain, ranks), 1e-4,
                         1e-5);
}

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
