// Makes the steps of the training, measures the model, and reports how a run
// goes: lines for people, and lines of JSON.
#ifndef EXAMPLES_LLAMA_TRAINING_TRAINER_H_
#define EXAMPLES_LLAMA_TRAINING_TRAINER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <fstream>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/device_graph.h"
#include "base/json.h"
#include "checkpoint/checkpointer.h"
#include "comm/communicator.h"
#include "examples/llama/data/token_batches.h"
#include "examples/llama/model/llama_config.h"
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
  // Cancelled on all ranks: a rank is told to stop (comm::StopRequest).
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

struct ProgressOptions {
  int64_t steps = 1;  // of the run
  int64_t every = 1;  // steps between two lines
  double flops_per_token = 0;
  // Where the model is. If its allocator counts, as a GPU's does, metrics have
  // the most that tensors took and that it held so far, in MiB.
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  // A file to which lines of JSON are appended; empty: none. When a run goes
  // on, it writes {"goes_on_after": step}: earlier lines of later steps are
  // void.
  std::string metrics;
};

// Used by rank 0. Thread-compatible.
class Progress {
 public:
  // `out` outlives it.
  Progress(const ProgressOptions& options, std::ostream* out);

  // Opens options.metrics. InvalidArgument: it cannot be opened. Comes first.
  absl::Status Open();
  // Says that the run goes on from the checkpoint of `step`.
  void GoesOn(int64_t step);
  // Says that the first step of this process begins at `now`.
  void Begin(absl::Time now);
  // Says that `step`, from 1, has ended.
  void Step(int64_t step, const StepResult& result, absl::Time now);
  void Evaluated(int64_t step, double loss);
  // ResourceExhausted: options.metrics could not be written completely.
  absl::Status Finish();

 private:
  void WriteMetrics(fsdp::Json::Object line);

  const ProgressOptions options_;
  std::ostream& out_;
  std::ofstream metrics_;
  // Rates leave out the first step, which allocates.
  absl::Time first_end_ = absl::InfinitePast();
  absl::Time begin_ = absl::InfinitePast();
  int64_t first_step_ = 0;
  absl::Time last_end_ = absl::InfinitePast();
};

// Returns "3:09" or "2:00:09".
std::string Clock(absl::Duration duration);

// Returns the floating-point operations of forward and backward for one token
// of a row of `seq`, as Chowdhery et al. 2022 (PaLM, appendix B) count them: 6
// per weight of the layers and the head, and 12 per layer, head, channel and
// token that attention looks at, without counting recomputation and what a
// causal mask spares. With a frozen base it is 4 per weight, as its gradients
// are not computed.
double FlopsPerToken(const LlamaConfig& config, int64_t seq, bool frozen_base);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_TRAINING_TRAINER_H_
