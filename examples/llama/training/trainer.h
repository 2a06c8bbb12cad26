// Makes the steps of the training, and measures the model.
#ifndef EXAMPLES_LLAMA_TRAINING_TRAINER_H_
#define EXAMPLES_LLAMA_TRAINING_TRAINER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/device_graph.h"
#include "checkpoint/run_guard.h"
#include "comm/communicator.h"
#include "examples/llama/data/token_batches.h"
#include "examples/llama/training/model.h"
#include "fsdp/capture/step_capture.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/optim/training_step.h"

namespace llama {

struct TrainerOptions {
  double learning_rate = 2e-5;  // the highest of the schedule
  fsdp::WarmUpCosineOptions schedule;
  double weight_decay = 0.1;
  double max_grad_norm = 1;  // 0: gradients are not clipped
  c10::Device device = c10::Device(c10::DeviceType::CPU);  // of the model
  int64_t micro_batches = 1;                               // per step
  // If true, gradients of all micro-batches but the last stay whole on each
  // rank: less is sent, but the memory of all gradients is needed.
  bool no_sync = false;
};

// The result of a step, the same on all ranks.
struct StepResult {
  double loss = 0;       // mean over the targets of all micro-batches and ranks
  double grad_norm = 0;  // before clipping
  double learning_rate = 0;
  int64_t targets = 0;    // those that count
  int64_t tokens = 0;     // of all ranks, padding included
  bool left_out = false;  // the optimizer has not stepped: see RunGuard
};

// Trains by AdamW, with betas of 0.9 and 0.95. The loss of a step is the mean
// over all its targets, however they are spread over ranks and micro-batches,
// as if in one large batch. The host waits for a device once a step, before the
// optimizer's. Thread-compatible. Whatever it borrows outlives it.
class Trainer {
 public:
  Trainer(Model model, TokenBatches* data,
          std::shared_ptr<fsdp::comm::Communicator> ranks,
          const TrainerOptions& options);
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Makes later steps replays of one, of data without documents. Errors are
  // those of fsdp::CapturedStep::Make(), whose rules hold. Numbers that are not
  // finite are found behind the optimizer's step, so that a guard may refuse
  // the step, but not leave it out.
  absl::Status Capture(const fsdp::DeviceGraphMaker& make_graph);

  // Makes step number `step`, from 0. Each micro-batch has a target: the loss
  // of one without is NaN. `guard` may refuse it or leave it out; it
  // may be null. Collective. An error of one rank ends the others' steps, too.
  absl::StatusOr<StepResult> Step(int64_t step,
                                  fsdp::checkpoint::RunGuard* guard = nullptr);

  // Returns the mean loss in nats over all targets of `data`. Collective.
  absl::StatusOr<double> Evaluate(const EvaluationBatches& data);

  fsdp::FusedAdamW& optimizer() { return optimizer_; }
  fsdp::WarmUpCosine& scheduler() { return scheduler_; }

 private:
  // Tokens and targets, [micro-batches, rows, seq], and the weight of each
  // micro-batch in the loss, on the device.
  using Inputs = fsdp::CapturedStep::Inputs;

  Inputs InputsOf(const std::vector<Batch>& batches, double all_targets) const;
  // Sums the gradients of all micro-batches and clips them. Returns this rank's
  // loss, of which the mean over the ranks is that of the step, and the norm:
  // two float64 on the device.
  absl::StatusOr<at::Tensor> Gradients(
      const Inputs& inputs, const std::vector<DocumentStarts>& starts);
  // Copies the two numbers to the host when they are computed.
  absl::StatusOr<at::Tensor> Await(const at::Tensor& numbers);

  Model model_;
  TokenBatches& data_;
  const std::shared_ptr<fsdp::comm::Communicator> ranks_;
  const TrainerOptions options_;
  fsdp::FusedAdamW optimizer_;
  fsdp::WarmUpCosine scheduler_;
  std::unique_ptr<fsdp::CapturedStep> captured_;  // null: steps run
};

}  // namespace llama

#endif  // EXAMPLES_LLAMA_TRAINING_TRAINER_H_
