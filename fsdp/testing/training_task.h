// Trains any model sharded, and in one process on the data of all ranks.
#ifndef FSDP_TESTING_TRAINING_TASK_H_
#define FSDP_TESTING_TRAINING_TASK_H_

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/optimizer.h>

#include <type_traits>

#include "fsdp/testing/sharded_test.h"  // IWYU pragma: export

namespace fsdp::testing {

// A model's forward.
using TensorFunction = std::function<at::Tensor(const at::Tensor&)>;
// An optimizer trains these; the names are those of the model's parameters.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
using OptimizerFactory = std::function<std::unique_ptr<torch::optim::Optimizer>(
    const NamedTensors&)>;

// With momentum.
OptimizerFactory Sgd(double learning_rate = 0.1, double weight_decay = 0);
OptimizerFactory AdamW(double learning_rate = 1e-2);

struct ClipBy {
  double max_norm;
  double norm_type;
};

// A training that can be done with any model.
struct TrainingTask {
  // Returns the mean loss over the data number `part`; every rank has its own
  // part for each backward.
  std::function<at::Tensor(const TensorFunction& forward, int64_t part)> loss;
  OptimizerFactory optimizer = Sgd();
  int steps = 5;
  int backwards = 1;  // per step, of which the last is reduced
  std::optional<ClipBy> clip;
  // If set, called after sharding.
  std::function<absl::Status(ShardedModuleBase&)> prepare;
  // If set, called between the last backward of a step and the optimizer's
  // step.
  std::function<void(const NamedTensors&)> before_step;
};

struct TaskRecord {
  std::vector<double> losses;  // of each step, over all parts
  std::vector<double> norms;   // before clipping
  // The parameters afterwards. Only a sharded run has a tied one under one
  // name.
  std::map<std::string, at::Tensor> parameters;
};

// Returns distinct parameters with their first names.
NamedTensors DistinctParameters(const torch::nn::Module& module);
NamedTensors Shards(const ShardedModuleBase& model);
std::vector<at::Tensor> TensorsOf(const NamedTensors& named);

absl::StatusOr<double> SumOverRanks(Communicator& world, double value);

// Returns Internal with the first number that is off by more than `relative`
// times the expected one and `absolute`.
absl::Status CheckSameRecord(const TaskRecord& actual,
                             const TaskRecord& expected, double relative,
                             double absolute = 1e-6);

// Calls a forward that takes and returns one tensor, as itself or as a
// TorchScript value.
template <typename Model>
at::Tensor Output(Model& model, const at::Tensor& x) {
  if constexpr (std::is_same_v<decltype(model.forward({x})), at::Tensor>) {
    return model.forward(x);
  } else {
    return model.forward({x}).toTensor();
  }
}

// Trains in one process on the parts of `world_size` ranks.
template <typename Net>
TaskRecord RunPlain(const TrainingTask& task, const std::shared_ptr<Net>& net,
                    int world_size) {
  TaskRecord record;
  const TensorFunction forward = [&net](const at::Tensor& x) {
    return Output(*net, x);
  };
  const NamedTensors parameters = DistinctParameters(*net);
  const auto optimizer = task.optimizer(parameters);
  const int parts = task.backwards * world_size;
  for (int step = 0; step < task.steps; ++step) {
    optimizer->zero_grad();
    double sum = 0;
    for (int part = 0; part < parts; ++part) {
      const at::Tensor loss = task.loss(forward, step * parts + part) / parts;
      loss.backward();
      sum += loss.template item<double>();
    }
    record.losses.push_back(sum);
    if (task.clip) {
      record.norms.push_back(torch::nn::utils::clip_grad_norm_(
          TensorsOf(parameters), task.clip->max_norm, task.clip->norm_type));
    }
    if (task.before_step) task.before_step(parameters);
    optimizer->step();
  }
  for (const auto& item : net->named_parameters()) {
    record.parameters[item.key()] = item.value().detach().clone();
  }
  return record;
}

// Trains `model` on this rank's parts. Returns an error if something gathered
// is left.
template <typename Net>
absl::StatusOr<TaskRecord> RunSharded(const TrainingTask& task,
                                      FullyShardedDataParallel<Net>& model) {
  TaskRecord record;
  Communicator& world = model->communicator();
  const TensorFunction forward = [&model](const at::Tensor& x) {
    return Output(*model, x);
  };
  const NamedTensors shards = Shards(*model);
  const auto optimizer = task.optimizer(shards);
  if (task.prepare) FSDP_RETURN_IF_ERROR(task.prepare(*model));
  for (int step = 0; step < task.steps; ++step) {
    optimizer->zero_grad();
    double sum = 0;
    for (int i = 0; i < task.backwards; ++i) {
      std::optional<NoSyncScope> no_sync;
      if (i + 1 < task.backwards) no_sync.emplace(model->NoSync());
      const int64_t part =
          (step * task.backwards + i) * world.world_size() + world.rank();
      const at::Tensor loss = task.loss(forward, part) / task.backwards;
      FSDP_RETURN_IF_ERROR(model->Backward(loss));
      sum += loss.template item<double>() / world.world_size();
    }
    FSDP_ASSIGN_OR_RETURN(const double mean, SumOverRanks(world, sum));
    record.losses.push_back(mean);
    if (task.clip) {
      FSDP_ASSIGN_OR_RETURN(
          const at::Tensor norm,
          model->ClipGradNorm(task.clip->max_norm, task.clip->norm_type));
      record.norms.push_back(norm.template item<double>());
    }
    if (task.before_step) task.before_step(shards);
    optimizer->step();
    FSDP_RETURN_IF_ERROR(
        CheckThat(model->memory_stats().parameters.in_use_bytes, Eq(0),
                  "bytes of parameters after a step"));
    FSDP_RETURN_IF_ERROR(CheckThat(model->memory_stats().gradients.in_use_bytes,
                                   Eq(0), "bytes of gradients after a step"));
  }
  FSDP_RETURN_IF_ERROR(model->ForEachFullParameter(
      [&record](const std::string& name, const at::Tensor& value) {
        record.parameters[name] = value.clone();
        return absl::OkStatus();
      }));
  return record;
}

// Shards the model of `make` over `mesh`, trains it, and compares it with a
// plain one.
template <typename Net>
absl::Status CheckTask(const TrainingTask& task,
                       const std::function<std::shared_ptr<Net>()>& make,
                       const Mesh& mesh, const Options& options,
                       double relative = 1e-5, double absolute = 1e-6) {
  FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(make(), mesh, options));
  FSDP_ASSIGN_OR_RETURN(const TaskRecord actual, RunSharded(task, model));
  const TaskRecord expected =
      RunPlain(task, make(), mesh.world()->world_size());
  return CheckSameRecord(actual, expected, relative, absolute);
}

// Trains a toy net of `dim` columns by AdamW, on four rows in each part.
TrainingTask ToyTask(int64_t dim = 7);

// Checks that `model`, whose data have `dim` columns, trains as `plain` does in
// one process, whatever has happened to it before.
template <typename Net>
absl::Status CheckTrains(FullyShardedDataParallel<Net>& model,
                         const std::shared_ptr<Net>& plain, int64_t dim) {
  TrainingTask task = ToyTask(dim);
  task.optimizer = Sgd();
  task.steps = 2;
  FSDP_ASSIGN_OR_RETURN(const TaskRecord actual, RunSharded(task, model));
  return CheckSameRecord(
      actual, RunPlain(task, plain, model->communicator().world_size()), 1e-5);
}

// Does CheckTask() with a toy net of seven columns and three blocks.
absl::Status CheckToy(const TrainingTask& task, const Mesh& mesh,
                      const Options& options, double relative = 1e-4,
                      double absolute = 1e-5);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_TRAINING_TASK_H_
