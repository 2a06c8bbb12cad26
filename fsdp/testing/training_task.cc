#include "fsdp/testing/training_task.h"

#include <ATen/ops/full.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <set>

#include "absl/algorithm/container.h"

namespace fsdp::testing {
namespace {

absl::Status CheckNumbers(absl::string_view what,
                          const std::vector<double>& actual,
                          const std::vector<double>& expected, double relative,
                          double absolute) {
  if (actual.size() != expected.size()) {
    return absl::InternalError(
        absl::StrCat(actual.size(), " of ", what, ", not ", expected.size()));
  }
  for (size_t step = 0; step < expected.size(); ++step) {
    const double error = std::abs(actual[step] - expected[step]);
    // This form also refuses NaN.
    if (error <= relative * std::abs(expected[step]) + absolute) continue;
    return absl::InternalError(absl::StrCat(
        what, " of step ", step, ": ", actual[step], ", not ", expected[step]));
  }
  return absl::OkStatus();
}

}  // namespace

OptimizerFactory Sgd(double learning_rate, double weight_decay) {
  return [=](const NamedTensors& parameters) {
    return std::make_unique<torch::optim::SGD>(
        TensorsOf(parameters), torch::optim::SGDOptions(learning_rate)
                                   .momentum(0.9)
                                   .weight_decay(weight_decay));
  };
}

OptimizerFactory AdamW(double learning_rate) {
  return [learning_rate](const NamedTensors& parameters) {
    return std::make_unique<torch::optim::AdamW>(
        TensorsOf(parameters), torch::optim::AdamWOptions(learning_rate));
  };
}

NamedTensors DistinctParameters(const torch::nn::Module& module) {
  NamedTensors result;
  std::set<const void*> seen;
  for (const auto& item : module.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
      result.emplace_back(item.key(), item.value());
    }
  }
  return result;
}

NamedTensors Shards(const ShardedModuleBase& model) {
  NamedTensors result;
  for (const TensorRange& named : model.Ranges()) {
    result.emplace_back(named.name, named.values);
  }
  return result;
}

std::vector<at::Tensor> TensorsOf(const NamedTensors& named) {
  std::vector<at::Tensor> result;
  for (const auto& [name, tensor] : named) result.push_back(tensor);
  return result;
}

absl::StatusOr<double> SumOverRanks(Communicator& world, double value) {
  const at::Tensor sum = at::full({1}, value, at::kDouble);
  FSDP_ASSIGN_OR_RETURN(auto work,
                        world.AllReduce(sum, comm::ReduceOp::kSum, "test"));
  FSDP_RETURN_IF_ERROR(work->Wait(absl::Now() + world.default_timeout()));
  return sum.item<double>();
}

absl::Status CheckSameRecord(const TaskRecord& actual,
                             const TaskRecord& expected, double relative,
                             double absolute) {
  FSDP_RETURN_IF_ERROR(
      CheckNumbers("loss", actual.losses, expected.losses, relative, absolute));
  FSDP_RETURN_IF_ERROR(
      CheckNumbers("norm", actual.norms, expected.norms, relative, absolute));
  for (const auto& [name, value] : expected.parameters) {
    if (actual.parameters.count(name) > 0) continue;
    // A tied parameter has one of its names.
    const bool is_tied = absl::c_any_of(
        actual.parameters, [&value = value, &expected](const auto& other) {
          const auto same = expected.parameters.find(other.first);
          return same != expected.parameters.end() && same->second.equal(value);
        });
    if (!is_tied) {
      return absl::InternalError(absl::StrCat("parameter ", name, " is gone"));
    }
  }
  for (const auto& [name, value] : actual.parameters) {
    const auto found = expected.parameters.find(name);
    if (found == expected.parameters.end()) {
      return absl::InternalError(absl::StrCat("unexpected parameter ", name));
    }
    if (at::allclose(value, found->second, relative, absolute)) continue;
    return absl::InternalError(absl::StrCat(
        "parameter ", name, " is ",
        (value - found->second).abs().max().item<double>(), " off"));
  }
  return absl::OkStatus();
}

TrainingTask ToyTask(int64_t dim) {
  TrainingTask task;
  task.loss = [dim](const TensorFunction& forward, int64_t part) {
    const at::Tensor x = Rows(part * 4, 4, dim);
    return Loss(forward(x).to(at::kFloat), x);
  };
  task.optimizer = AdamW();
  return task;
}

absl::Status CheckToy(const TrainingTask& task, const Mesh& mesh,
                      const Options& options, double relative,
                      double absolute) {
  return CheckTask<NetImpl>(
      task, [] { return MakeNet(7, 3); }, mesh, options, relative, absolute);
}

}  // namespace fsdp::testing
