#include "examples/llama/training/trainer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <limits>
#include <optional>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optimizer_check.h"

namespace llama {
namespace {

torch::optim::AdamWOptions OptionsOf(const TrainerOptions& options) {
  return torch::optim::AdamWOptions(options.learning_rate)
      .betas({0.9, 0.95})
      .weight_decay(options.weight_decay);
}

double CountTargets(const Batch& batch) {
  return batch.targets.ne(kNoTarget).sum().item<double>();
}

}  // namespace

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

absl::Status Trainer::Capture(const fsdp::DeviceGraphMaker& make_graph) {
  fsdp::CaptureOptions options;
  options.make_graph = make_graph;
  const auto step = [this](const Inputs& inputs) -> absl::StatusOr<at::Tensor> {
    const std::vector<DocumentStarts> none(options_.micro_batches);
    FSDP_ASSIGN_OR_RETURN(at::Tensor numbers, Gradients(inputs, none));
    optimizer_.step();
    optimizer_.zero_grad();
    return numbers;
  };
  FSDP_ASSIGN_OR_RETURN(
      captured_, fsdp::CapturedStep::Make(*model_, optimizer_, step, options));
  return absl::OkStatus();
}

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
  std::vector<DocumentStarts> starts;
  for (const Batch& batch : batches) {
    targets += CountTargets(batch);
    result.tokens += batch.tokens.numel() * ranks_->world_size();
    starts.push_back(batch.starts);
    FSDP_CHECK(captured_ == nullptr || starts.back().empty());
  }
  FSDP_ASSIGN_OR_RETURN(targets, fsdp::comm::Sum(*ranks_, targets));
  result.targets = static_cast<int64_t>(targets);
  result.learning_rate = optimizer_.param_groups()[0].options().get_lr();
  Inputs inputs;
  FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus(
      "copying a batch", [&] { inputs = InputsOf(batches, targets); }));
  FSDP_ASSIGN_OR_RETURN(at::Tensor numbers, captured_ != nullptr
                                                ? captured_->Run(inputs)
                                                : Gradients(inputs, starts));
  FSDP_ASSIGN_OR_RETURN(numbers, Await(numbers));
  const double loss = numbers.const_data_ptr<double>()[0];
  result.grad_norm = numbers.const_data_ptr<double>()[1];
  if (guard != nullptr) {
    FSDP_ASSIGN_OR_RETURN(const bool may_step,
                          guard->MayStep(step + 1, loss, result.grad_norm));
    result.left_out = !may_step;
    result.loss = guard->mean_loss();
  } else {
    FSDP_ASSIGN_OR_RETURN(result.loss, fsdp::comm::Mean(*ranks_, loss));
  }
  FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("a step of the optimizer", [&] {
    if (captured_ == nullptr) {
      if (!result.left_out) optimizer_.step();
      optimizer_.zero_grad();
    }
    scheduler_.step();
  }));
  return result;
}

Trainer::Inputs Trainer::InputsOf(const std::vector<Batch>& batches,
                                  double all_targets) const {
  std::vector<at::Tensor> tokens;
  std::vector<at::Tensor> targets;
  std::vector<float> weights;
  for (const Batch& batch : batches) {
    tokens.push_back(batch.tokens);
    targets.push_back(batch.targets);
    // Gradients become the mean over ranks, while the sum is wanted.
    weights.push_back(static_cast<float>(CountTargets(batch) / all_targets *
                                         ranks_->world_size()));
  }
  return {fsdp::CopyToDevice(at::stack(tokens), options_.device),
          fsdp::CopyToDevice(at::stack(targets), options_.device),
          fsdp::CopyToDevice(at::tensor(weights), options_.device)};
}

absl::StatusOr<at::Tensor> Trainer::Gradients(
    const Inputs& inputs, const std::vector<DocumentStarts>& starts) {
  at::Tensor sum;
  for (int64_t i = 0; i < options_.micro_batches; ++i) {
    std::optional<fsdp::NoSyncScope> no_sync;
    if (options_.no_sync && i + 1 < options_.micro_batches) {
      no_sync.emplace(model_->NoSync());
    }
    at::Tensor loss;
    FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("forward", [&] {
      loss =
          model_->forward(inputs[0][i], starts[i], inputs[1][i]) * inputs[2][i];
      const at::Tensor value = loss.detach().to(at::kDouble);
      sum = sum.defined() ? sum + value : value;
    }));
    FSDP_RETURN_IF_ERROR(model_->Backward(loss));
  }
  // A norm of infinity only measures.
  FSDP_ASSIGN_OR_RETURN(
      const at::Tensor norm,
      model_->ClipGradNorm(options_.max_grad_norm > 0
                               ? options_.max_grad_norm
                               : std::numeric_limits<double>::infinity()));
  at::Tensor numbers;
  FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("the norm of gradients", [&] {
    numbers = at::stack({sum, norm.to(at::kDouble)});
  }));
  return numbers;
}

absl::StatusOr<at::Tensor> Trainer::Await(const at::Tensor& numbers) {
  // Only collectives of a replay have no deadline of their own.
  const absl::Time deadline = captured_ != nullptr
                                  ? absl::Now() + ranks_->default_timeout()
                                  : absl::InfiniteFuture();
  fsdp::HostCopy here;
  bool is_here = false;
  FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("reading the loss", [&] {
    here = fsdp::CopyToHost(numbers);
    is_here = here.is_there.Wait(deadline);
  }));
  if (is_here) return here.values;
  const absl::Status late = absl::DeadlineExceededError(
      "reading the loss: the device has not computed it");
  ranks_->Abort(late);
  return late;
}

absl::StatusOr<double> Trainer::Evaluate(const EvaluationBatches& data) {
  const c10::NoGradGuard no_grad;
  model_->eval();
  at::Tensor losses =
      at::zeros({}, at::TensorOptions(at::kDouble).device(options_.device));
  double sum = 0;
  double targets = 0;
  absl::Status status;
  for (int64_t i = 0; i < data.num_batches() && status.ok(); ++i) {
    absl::StatusOr<Batch> batch = data.Read(i);
    status = fsdp::comm::Agree(*ranks_, batch.status(), "reading a batch",
                               absl::Now() + ranks_->default_timeout());
    if (!status.ok()) break;
    const double count = CountTargets(*batch);
    status = fsdp::TorchToStatus("evaluation", [&] {
      const at::Tensor loss = model_->forward(
          fsdp::CopyToDevice(batch->tokens, options_.device), batch->starts,
          fsdp::CopyToDevice(batch->targets, options_.device));
      // The mean over no targets is not a number.
      if (count > 0) losses += loss.to(at::kDouble) * count;
    });
    targets += count;
  }
  model_->train();
  if (status.ok()) {
    status =
        fsdp::TorchToStatus("evaluation", [&] { sum = losses.item<double>(); });
  }
  FSDP_RETURN_IF_ERROR(status);
  FSDP_ASSIGN_OR_RETURN(sum, fsdp::comm::Sum(*ranks_, sum));
  FSDP_ASSIGN_OR_RETURN(targets, fsdp::comm::Sum(*ranks_, targets));
  return sum / targets;
}

}  // namespace llama
