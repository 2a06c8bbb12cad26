#include "examples/llama/training/trainer.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/run_guard.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "examples/llama/data/token_batches.h"
#include "examples/llama/training/model.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optimizer_check.h"

namespace llama {
namespace {

torch::optim::AdamWOptions OptionsOf(const TrainerOptions& options) {
  return torch::optim::AdamWOptions(options.learning_rate)
      .betas({0.9, 0.95})
      .weight_decay(options.weight_decay);
}

at::Tensor LossOf(Model& model, const Batch& batch, c10::Device device) {
  return model->forward(batch.tokens.to(device), StartsOf(batch),
                        batch.targets.to(device));
}

}  // namespace

DocumentStarts StartsOf(const Batch& batch) {
  const bool none = absl::c_all_of(
      batch.documents, [](const auto& begins) { return begins.empty(); });
  DocumentStarts starts;
  if (none) return starts;
  int64_t row = 0;
  for (const std::vector<int64_t>& begins : batch.documents) {
    if (begins.empty()) starts.push_back(row);
    for (const int64_t begin : begins) starts.push_back(row + begin);
    row += batch.tokens.size(1);
  }
  return starts;
}

int64_t CountTargets(const Batch& batch) {
  return batch.targets.ne(kNoTarget).sum().item<int64_t>();
}

Trainer::Trainer(Model model, TokenBatches* data,
                 std::shared_ptr<fsdp::comm::Communicator> ranks,
                 const TrainerOptions& options)
    : model_(std::move(model)),
      data_(*data),
      ranks_(std::move(ranks)),
      options_(options),
      optimizer_(fsdp::DecayGroups(*model_, OptionsOf(options)),
                 OptionsOf(options)),
      scheduler_(optimizer_, options.schedule) {}

absl::StatusOr<StepResult> Trainer::Step(int64_t step,
                                         fsdp::checkpoint::RunGuard* guard) {
  std::vector<Batch> batches;
  absl::Status read;
  for (int64_t i = 0; i < options_.micro_batches && read.ok(); ++i) {
    absl::StatusOr<Batch> batch = data_.Next();
    read = batch.status();
    if (batch.ok()) batches.push_back(*std::move(batch));
  }
  FSDP_RETURN_IF_ERROR(
      fsdp::comm::Agree(*ranks_, read, "reading a batch",
                        absl::Now() + ranks_->default_timeout()));
  StepResult result;
  double targets = 0;
  for (const Batch& batch : batches) {
    targets += static_cast<double>(CountTargets(batch));
    result.tokens += batch.tokens.numel() * ranks_->world_size();
  }
  FSDP_ASSIGN_OR_RETURN(targets, fsdp::comm::Sum(*ranks_, targets));
  result.targets = static_cast<int64_t>(targets);
  FSDP_ASSIGN_OR_RETURN(const double loss, Backward(batches, targets));
  FSDP_ASSIGN_OR_RETURN(result.loss, fsdp::comm::Sum(*ranks_, loss));
  // A norm of infinity only measures.
  FSDP_ASSIGN_OR_RETURN(
      const at::Tensor norm,
      model_->ClipGradNorm(options_.max_grad_norm > 0
                               ? options_.max_grad_norm
                               : std::numeric_limits<double>::infinity()));
  result.grad_norm = norm.item<double>();
  result.learning_rate = optimizer_.param_groups()[0].options().get_lr();
  if (guard != nullptr) {
    FSDP_ASSIGN_OR_RETURN(const bool may_step,
                          guard->MayStep(step + 1, loss, result.grad_norm));
    result.left_out = !may_step;
  }
  FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("a step of the optimizer", [&] {
    if (!result.left_out) optimizer_.step();
    optimizer_.zero_grad();
    scheduler_.step();
  }));
  return result;
}

absl::StatusOr<double> Trainer::Backward(const std::vector<Batch>& batches,
                                         double all_targets) {
  double sum = 0;
  for (size_t i = 0; i < batches.size(); ++i) {
    std::optional<fsdp::NoSyncScope> no_sync;
    if (options_.no_sync && i + 1 < batches.size()) {
      no_sync.emplace(model_->NoSync());
    }
    const auto targets = static_cast<double>(CountTargets(batches[i]));
    at::Tensor loss;
    FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("forward", [&] {
      // Gradients become the mean over ranks, while the sum is wanted.
      loss = LossOf(model_, batches[i], options_.device) *
             (targets / all_targets * ranks_->world_size());
    }));
    FSDP_RETURN_IF_ERROR(model_->Backward(loss));
    // The mean over no targets is not a number.
    if (targets > 0) sum += loss.item<double>() / ranks_->world_size();
  }
  return sum;
}

absl::StatusOr<double> Trainer::Evaluate(const EvaluationBatches& data) {
  const c10::NoGradGuard no_grad;
  model_->eval();
  double sum = 0;
  double targets = 0;
  absl::Status status;
  for (int64_t i = 0; i < data.num_batches() && status.ok(); ++i) {
    absl::StatusOr<Batch> batch = data.Read(i);
    status = fsdp::comm::Agree(*ranks_, batch.status(), "reading a batch",
                               absl::Now() + ranks_->default_timeout());
    if (!status.ok()) break;
    const auto count = static_cast<double>(CountTargets(*batch));
    status = fsdp::TorchToStatus("evaluation", [&] {
      const auto loss = LossOf(model_, *batch, options_.device).item<double>();
      if (count > 0) sum += loss * count;
    });
    targets += count;
  }
  model_->train();
  FSDP_RETURN_IF_ERROR(status);
  FSDP_ASSIGN_OR_RETURN(sum, fsdp::comm::Sum(*ranks_, sum));
  FSDP_ASSIGN_OR_RETURN(targets, fsdp::comm::Sum(*ranks_, targets));
  return sum / targets;
}

}  // namespace llama
