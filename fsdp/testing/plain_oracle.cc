#include "fsdp/testing/plain_oracle.h"

#include <ATen/ops/full.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <cmath>

namespace fsdp::testing {
namespace {

std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(
    const TrainingPlan& plan, const std::vector<at::Tensor>& parameters) {
  if (plan.adam) {
    return std::make_unique<torch::optim::AdamW>(
        parameters, torch::optim::AdamWOptions(1e-2));
  }
  return std::make_unique<torch::optim::SGD>(
      parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
}

absl::Status SumOverRanks(comm::Communicator& world, const at::Tensor& value) {
  FSDP_ASSIGN_OR_RETURN(auto work,
                        world.AllReduce(value, comm::ReduceOp::kSum, "loss"));
  return work->Wait(absl::Now() + absl::Seconds(30));
}

}  // namespace

TrainingRecord TrainPlain(const TrainingPlan& plan, int world_size) {
  TrainingRecord record;
  std::shared_ptr<NetImpl> net = MakeNet(plan.dim, plan.blocks);
  const auto optimizer = MakeOptimizer(plan, net->parameters());
  const int64_t rows = plan.rows * world_size * plan.backwards;
  for (int step = 0; step < plan.steps; ++step) {
    const at::Tensor x = Rows(step * rows, rows, plan.dim);
    at::Tensor loss = Loss(net->forward(x), x);
    optimizer->zero_grad();
    loss.backward();
    optimizer->step();
    record.losses.push_back(loss.item<double>());
  }
  for (const auto& item : net->named_parameters()) {
    record.parameters[item.key()] = item.value().detach().clone();
  }
  return record;
}

absl::Status TrainSharded(const TrainingPlan& plan, const comm::Mesh& mesh,
                          const Options& options, TrainingRecord* record) {
  comm::Communicator& world = *mesh.world();
  FSDP_ASSIGN_OR_RETURN(
      FullyShardedDataParallel<NetImpl> model,
      FullyShard(MakeNet(plan.dim, plan.blocks), mesh, options));
  const auto optimizer = MakeOptimizer(plan, model->Parameters());
  if (plan.prepare) FSDP_RETURN_IF_ERROR(plan.prepare(*model));
  if (plan.step_in_backward) {
    FSDP_RETURN_IF_ERROR(model->StepInBackward([&](auto) {
      optimizer->step();
      optimizer->zero_grad();
      return absl::OkStatus();
    }));
  }
  for (int step = 0; step < plan.steps; ++step) {
    if (!plan.step_in_backward) optimizer->zero_grad();
    double sum = 0;
    for (int i = 0; i < plan.backwards; ++i) {
      const int64_t part =
          (step * plan.backwards + i) * world.world_size() + world.rank();
      const at::Tensor x = Rows(part * plan.rows, plan.rows, plan.dim);
      std::optional<NoSyncScope> no_sync;
      if (plan.no_sync && i + 1 < plan.backwards) {
        no_sync.emplace(model->NoSync());
      }
      const at::Tensor loss =
          Loss(model->forward(x).to(at::kFloat), x) / plan.backwards;
      FSDP_RETURN_IF_ERROR(model->Backward(loss));
      sum += loss.item<double>();
    }
    if (!plan.step_in_backward) optimizer->step();
    const at::Tensor mean =
        at::full({1}, sum / world.world_size(), at::kDouble);
    FSDP_RETURN_IF_ERROR(SumOverRanks(world, mean));
    record->losses.push_back(mean.item<double>());
    FSDP_RETURN_IF_ERROR(
        CheckThat(model->memory_stats().parameters.in_use_bytes,
                  ::testing::Eq(0), "bytes of parameters after a step"));
    FSDP_RETURN_IF_ERROR(CheckThat(model->memory_stats().gradients.in_use_bytes,
                                   ::testing::Eq(0),
                                   "bytes of gradients after a step"));
  }
  return model->ForEachFullParameter(
      [record](const std::string& name, const at::Tensor& value) {
        record->parameters[name] = value.clone();
        return absl::OkStatus();
      });
}

absl::Status CheckSameTraining(const TrainingRecord& actual,
                               const TrainingRecord& expected, double relative,
                               double absolute) {
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    const double error = std::abs(actual.losses[i] - expected.losses[i]);
    // This form also refuses NaN.
    if (error <= relative * std::abs(expected.losses[i]) + absolute) continue;
    return absl::InternalError(absl::StrCat("loss of step ", i, ": ",
                                            actual.losses[i], " not ",
                                            expected.losses[i]));
  }
  for (const auto& [name, value] : expected.parameters) {
    const auto found = actual.parameters.find(name);
    if (found == actual.parameters.end()) {
      return absl::InternalError(absl::StrCat("no parameter ", name));
    }
    if (at::allclose(found->second, value, relative, absolute)) continue;
    return absl::InternalError(absl::StrCat(
        "parameter ", name, " is ",
        (found->second - value).abs().max().item<double>(), " off"));
  }
  return absl::OkStatus();
}

absl::Status CheckAgainstPlain(const TrainingPlan& plan, const comm::Mesh& mesh,
                               const Options& options, double relative,
                               double absolute) {
  TrainingRecord actual;
  FSDP_RETURN_IF_ERROR(TrainSharded(plan, mesh, options, &actual));
  return CheckSameTraining(actual, TrainPlain(plan, mesh.world()->world_size()),
                           relative, absolute);
}

}  // namespace fsdp::testing
