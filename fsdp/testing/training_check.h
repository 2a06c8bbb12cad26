// Trains a sharded model and a plain one on the same rows and compares them.
#ifndef FSDP_TESTING_TRAINING_CHECK_H_
#define FSDP_TESTING_TRAINING_CHECK_H_

#include <torch/optim/sgd.h>

#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/training_task.h"

namespace fsdp::testing {

// A training that both models do. Net::forward takes and returns one tensor, as
// itself or as a TorchScript value.
template <typename Net>
struct Training {
  std::function<std::shared_ptr<Net>()> make_net;
  Options options;
  int steps = 3;
  int64_t dim = 5;
  // Called on both before each step, on rank `rank` of the sharded model and on
  // the plain one before it sees the rows of that rank.
  std::function<void(Net&, int step, int rank)> before_forward = [](Net&, int,
                                                                    int) {};
};

// Checks losses, gradients by their effect on parameters, and the memory that
// is left after a step.
template <typename Net>
absl::Status CheckTraining(comm::Communicator& communicator,
                           const Training<Net>& training) {
  const int ranks = communicator.world_size();
  const auto task_of = [&](Net& net) {
    TrainingTask task;
    task.steps = training.steps;
    task.optimizer = [](const NamedTensors& parameters) {
      // Decay shows a gradient of zeros instead of none, momentum the order of
      // steps.
      return std::make_unique<torch::optim::SGD>(
          TensorsOf(parameters),
          torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
    };
    task.loss = [&training, &net, ranks](const TensorFunction& forward,
                                         int64_t part) {
      training.before_forward(net, static_cast<int>(part / ranks),
                              static_cast<int>(part % ranks));
      return forward(Rows(3 * part, 3, training.dim)).square().mean();
    };
    return task;
  };
  FSDP_ASSIGN_OR_RETURN(
      FullyShardedDataParallel<Net> model,
      FullyShard(training.make_net(), Unowned(communicator), training.options));
  FSDP_ASSIGN_OR_RETURN(const TaskRecord actual,
                        RunSharded(task_of(*model->module()), model));
  const std::shared_ptr<Net> plain = training.make_net();
  return CheckSameRecord(actual, RunPlain(task_of(*plain), plain, ranks), 1e-4,
                         1e-5);
}

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_TRAINING_CHECK_H_
