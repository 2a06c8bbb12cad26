// Trains a sharded model and a plain one side by side and compares them.
#ifndef FSDP_TESTING_TRAINING_CHECK_H_
#define FSDP_TESTING_TRAINING_CHECK_H_

#include <torch/optim/sgd.h>

#include <cmath>
#include <type_traits>

#include "fsdp/testing/sharded_test.h"

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

inline torch::optim::SGDOptions SgdOptions() {
  // Decay shows a gradient of zeros instead of none, momentum the order of
  // steps.
  return torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01);
}

inline at::Tensor LossOn(const at::Tensor& output) {
  return output.square().mean();
}

inline at::Tensor RowsOf(int step, int rank, int world_size, int64_t dim) {
  constexpr int64_t kRows = 3;
  return Rows((step * world_size + rank) * kRows, kRows, dim);
}

template <typename Model>
at::Tensor Output(Model& model, const at::Tensor& x) {
  if constexpr (std::is_same_v<decltype(model.forward({x})), at::Tensor>) {
    return model.forward(x);
  } else {
    return model.forward({x}).toTensor();
  }
}

// Returns tied parameters once, unlike parameters().
inline std::vector<at::Tensor> DistinctParameters(
    const torch::nn::Module& module) {
  std::vector<at::Tensor> distinct;
  for (const at::Tensor& parameter : module.parameters()) {
    const bool is_new =
        std::none_of(distinct.begin(), distinct.end(),
                     [&](const at::Tensor& t) { return t.is_same(parameter); });
    if (is_new) distinct.push_back(parameter);
  }
  return distinct;
}

// Checks the losses of every step on this rank's rows, gradients by their
// effect on parameters, and the memory that is left after a step.
template <typename Net>
absl::Status CheckTraining(comm::Communicator& communicator,
                           const Training<Net>& training) {
  const int world_size = communicator.world_size();
  std::shared_ptr<Net> plain = training.make_net();
  torch::optim::SGD plain_optimizer(DistinctParameters(*plain), SgdOptions());
  FSDP_ASSIGN_OR_RETURN(
      FullyShardedDataParallel<Net> model,
      FullyShard(training.make_net(), Unowned(communicator), training.options));
  torch::optim::SGD optimizer(model->Parameters(), SgdOptions());
  for (int step = 0; step < training.steps; ++step) {
    plain_optimizer.zero_grad();
    double expected = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      training.before_forward(*plain, step, rank);
      const at::Tensor loss =
          LossOn(Output(*plain, RowsOf(step, rank, world_size, training.dim)));
      (loss / world_size).backward();
      if (rank == communicator.rank()) expected = loss.item<double>();
    }
    plain_optimizer.step();

    optimizer.zero_grad();
    training.before_forward(*model->module(), step, communicator.rank());
    const at::Tensor loss = LossOn(Output(
        *model, RowsOf(step, communicator.rank(), world_size, training.dim)));
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    const MemoryStats stats = model->memory_stats();
    if (stats.parameters.in_use_bytes != 0 ||
        stats.gradients.in_use_bytes != 0) {
      return absl::InternalError(
          absl::StrCat("memory is left after step ", step));
    }
    optimizer.step();
    if (std::abs(loss.item<double>() - expected) > 1e-5 * (1 + expected)) {
      return absl::InternalError(absl::StrCat(
          "loss of step ", step, ": ", loss.item<double>(), " not ", expected));
    }
  }
  const auto parameters = plain->named_parameters();
  return model->ForEachFullParameter(
      [&parameters](const std::string& name, const at::Tensor& value) {
        if (at::allclose(value, parameters[name], 1e-4, 1e-6)) {
          return absl::OkStatus();
        }
        return absl::InternalError(absl::StrCat("parameter ", name));
      });
}

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_TRAINING_CHECK_H_
