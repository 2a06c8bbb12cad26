#include "examples/gpt/trainer.h"

#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/work.h"
#include "examples/gpt/model.h"
#include "fsdp/fused_optimizer.h"
#include "fsdp/trace.h"

namespace gpt {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::ReduceOp;
using ::fsdp::comm::Work;

// The sums over the ranks. Also a barrier.
absl::StatusOr<std::vector<double>> SumOverRanks(
    const std::vector<double>& values, absl::string_view label,
    Communicator& communicator) {
  const fsdp::TraceSpan span("sum over ranks");
  const at::Tensor sums = at::tensor(values, at::kDouble);
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<Work> work,
                        communicator.AllReduce(sums, ReduceOp::kSum, label));
  FSDP_RETURN_IF_ERROR(
      work->Wait(absl::Now() + communicator.default_timeout()));
  const double* data = sums.const_data_ptr<double>();
  return std::vector<double>(data, data + sums.numel());
}

Batch NextBatch(BatchSource& data) {
  const fsdp::TraceSpan span("data");
  return data.Next();
}

// Forward, backward, and the optimizer's step; returns this rank's loss.
absl::StatusOr<double> TrainStep(const Batch& batch, TrainableModel& model,
                                 fsdp::FusedAdamW& optimizer) {
  at::Tensor loss;
  FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("forward", [&] {
    loss = NextTokenLoss(model.Forward(batch.inputs), batch.targets);
  }));
  FSDP_RETURN_IF_ERROR(model.Backward(loss));
  FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("optimizer", [&] {
    const fsdp::TraceSpan span("optimizer");
    optimizer.step();
    optimizer.zero_grad();
  }));
  return loss.item<double>();
}

}  // namespace

absl::StatusOr<TrainingResult> Train(const TrainerOptions& options,
                                     TrainableModel& model, BatchSource& data,
                                     Communicator& communicator) {
  fsdp::FusedAdamW optimizer(model.OptimizerParameters(),
                             torch::optim::AdamWOptions(options.lr));
  TrainingResult result;
  const int64_t last_step = options.warmup + options.steps;
  const int64_t first_timed = std::max(options.warmup, options.done) + 1;
  for (int64_t step = 1; step <= options.done; ++step) data.Next();
  for (int64_t step = options.done + 1; step <= last_step && !result.stopped;
       ++step) {
    if (step == first_timed && options.on_timed_begin) options.on_timed_begin();
    const fsdp::TraceStep traced(step);
    const Batch batch = NextBatch(data);
    const absl::Time begin = absl::Now();
    absl::StatusOr<double> loss = TrainStep(batch, model, optimizer);
    if (!loss.ok()) {
      return fsdp::Annotate(loss.status(), absl::StrCat("step ", step));
    }
    const bool stop = options.stop_requested && options.stop_requested();
    FSDP_ASSIGN_OR_RETURN(
        std::vector<double> sums,
        SumOverRanks({*loss, stop ? 1.0 : 0.0}, "loss", communicator));
    if (step > options.warmup) {
      result.step_seconds.push_back(absl::ToDoubleSeconds(absl::Now() - begin));
    }
    result.own_losses.push_back(*loss);
    result.mean_losses.push_back(sums[0] / communicator.world_size());
    result.stopped = sums[1] > 0 && step < last_step;
    if (options.on_step) options.on_step(step, result.mean_losses.back());
  }
  return result;
}

absl::StatusOr<double> ValidationLoss(TrainableModel& model,
                                      absl::Span<const Batch> batches,
                                      Communicator& communicator) {
  const c10::NoGradGuard no_grad;
  double sum = 0;
  for (const Batch& batch : batches) {
    FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("validation", [&] {
      sum += NextTokenLoss(model.Forward(batch.inputs), batch.targets)
                 .item<double>();
    }));
  }
  FSDP_ASSIGN_OR_RETURN(std::vector<double> sums,
                        SumOverRanks({sum}, "validation", communicator));
  return sums[0] / (communicator.world_size() * batches.size());
}

}  // namespace gpt
