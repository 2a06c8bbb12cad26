// A training loop needs these around the optimizer's step: it clips gradients,
// scales losses, sets learning rates and averages weights.
#ifndef FSDP_OPTIM_TRAINING_STEP_H_
#define FSDP_OPTIM_TRAINING_STEP_H_

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "ranges/tensor_range.h"

namespace fsdp {

// --- Clipping ----------------------------------------------------------------
// Options of ClipGradNorm(). They are the same on all ranks.
struct ClipGradNormOptions {
  double max_norm = 1.0;   // > 0; infinity only measures
  double norm_type = 2.0;  // p > 0; infinity: the largest absolute value

  // Refuses a norm that is infinite or NaN; the host then waits for the device.
  // If false, such a norm makes gradients zero or NaN, as torch's
  // clip_grad_norm_ does.
  bool error_if_nonfinite = false;

  // Longest wait of the host. Positive; if unset, the communicator's.
  std::optional<absl::Duration> timeout = std::nullopt;
};

// Multiplies all gradients by min(1, max_norm / (norm + 1e-6)). `norm` is the
// p-norm of the gradients of all ranks as one vector, in which each range
// counts once, however many ranks hold it. Returns the norm: one element
// without dimensions, float64 if a shard is and float32 otherwise, with the
// same bits on all ranks. It is computed in float32 at least.
//
// Collective: one all-reduce over `world`, all ranks that hold a part of the
// model, also those without a gradient. Parameters without one are skipped.
//
// InvalidArgument, before anything is sent: max_norm, norm_type or the timeout
// is not positive. FailedPrecondition, on all ranks and with gradients
// unchanged: error_if_nonfinite has refused the norm.
absl::StatusOr<at::Tensor> ClipGradNorm(comm::Communicator& world,
                                        absl::Span<const TensorRange> shards,
                                        const ClipGradNormOptions& options);

// --- Scaling of losses -------------------------------------------------------
// Scales losses for training in float16, where small gradients would be zero.
//
//   fsdp::ShardedGradScaler scaler = fsdp::ValueOrThrow(
//       fsdp::ShardedGradScaler::Create(model->communicator()));
//   for each batch:
//     status = model->Backward(scaler.Scale(loss));
//     found_inf = scaler.Unscale(model->Ranges());   // to clip, say
//     norm = model->ClipGradNorm(1.0);
//     stepped = scaler.Step(optimizer, model->Ranges());
//     status = scaler.Update();

// Options of a ShardedGradScaler. They are the same on all ranks.
struct GradScalerOptions {
  bool enabled = true;        // false: losses and gradients are left alone
  float init_scale = 65536;   // > 0
  float growth_factor = 2;    // > 1
  float backoff_factor = .5;  // between 0 and 1
  // The scale grows after this many steps in a row without infinity or NaN.
  int growth_interval = 2000;

  // Longest wait of the host. Positive; if unset, the communicator's.
  std::optional<absl::Duration> timeout = std::nullopt;
};

// The state that a checkpoint saves.
struct GradScalerState {
  float scale;         // factor of losses
  int growth_tracker;  // steps since the scale has changed
};

// torch.amp.GradScaler over ranks. All ranks make the same calls and have the
// same scale. If a gradient of one rank is infinite or NaN, all skip the step.
class ShardedGradScaler {
 public:
  // `world` is all ranks that hold a part of the model, and outlives the
  // scaler. InvalidArgument: an option is outside its range.
  static absl::StatusOr<ShardedGradScaler> Create(
      comm::Communicator& world,
      const GradScalerOptions& options = GradScalerOptions());

  // Returns loss * scale().
  at::Tensor Scale(const at::Tensor& loss) const;

  // Divides the gradients by scale(), and returns whether a gradient of any
  // rank was infinite or NaN, by one all-reduce. FailedPrecondition: it was
  // called already since the last Update().
  absl::StatusOr<bool> Unscale(absl::Span<const TensorRange> shards);

  // Unscales `shards`, unless that is done, and calls `step`, unless a gradient
  // was infinite or NaN. Returns whether it called `step`, or the error of
  // `step`. With several optimizers call Unscale() for all shards and then
  // Step() for each. FailedPrecondition: a Step() since the last Update() had
  // to unscale.
  absl::StatusOr<bool> Step(FallibleRef step,
                            absl::Span<const TensorRange> shards);
  absl::StatusOr<bool> Step(torch::optim::Optimizer& optimizer,
                            absl::Span<const TensorRange> shards);

  // Ends the step: lowers the scale if the step was skipped, and raises it
  // after growth_interval others. FailedPrecondition: nothing was unscaled.
  absl::Status Update();

  bool enabled() const { return options_.enabled; }  // as Create() was told
  // The present factor of losses; 1 if not enabled.
  float scale() const { return enabled() ? state_.scale : 1; }

  // The state, for SetState() of another run.
  const GradScalerState& state() const { return state_; }
  // InvalidArgument: the scale is not positive and finite, or the number of
  // steps is negative.
  absl::Status SetState(const GradScalerState& state);

 private:
  enum class Stage {
    kScaled,
    kUnscaled,
    kUnscaledByStep,
  };

  ShardedGradScaler(comm::Communicator& world, const GradScalerOptions& options)
      : world_(&world), options_(options), state_{options.init_scale, 0} {}

  comm::Communicator* world_;
  GradScalerOptions options_;
  GradScalerState state_;
  Stage stage_ = Stage::kScaled;
  bool found_inf_ = false;  // among the gradients that are unscaled
};

// --- Learning rates ----------------------------------------------------------
// A schedule of learning rates: a warm-up, then half a cosine.

// The lengths of a WarmUpCosine, and where it ends.
struct WarmUpCosineOptions {
  int64_t warm_up = 0;  // steps
  int64_t steps = 1;    // of the whole run, warm-up included
  double floor = 0.1;   // the last rate, as a part of the peak
};

// The schedule. It works as torch::optim's schedulers do: call step() after
// each step of the optimizer. TrainingRun::schedulers saves its state.
class WarmUpCosine final : public torch::optim::LRScheduler {
 public:
  // Takes the present rate of each group as its peak, and sets the rates of the
  // first step.
  WarmUpCosine(torch::optim::Optimizer& optimizer,
               const WarmUpCosineOptions& options);

  // Sets the rates of the next step. Loading a checkpoint calls it, since the
  // optimizer has the saved run's rates then. c10::Error: the optimizer has got
  // groups since the schedule was made.
  void SetRates();

  // Returns the rate of step `step`, counted from 0, as a part of the peak. It
  // rises linearly from 1 / warm_up to 1, stays there for the first step after
  // the warm-up, and falls by half a cosine to `floor` after the last step.
  static double At(int64_t step, const WarmUpCosineOptions& options);

  // Returns the options as text, by which checkpoints tell schedules apart.
  std::string ToString() const;

 private:
  std::vector<double> get_lrs() override;

  torch::optim::Optimizer& steps_by_;
  const WarmUpCosineOptions options_;
  std::vector<double> peaks_;  // of groups
};

// --- Averages ----------------------------------------------------------------
// An exponential moving average of a model's weights (EMA), for evaluation and
// export. Each rank averages its own shards and sends nothing.
//
//   fsdp::WeightAverage average(model->Parameters());
//   run.average = &average;             // a checkpoint::TrainingRun saves it
//   ... optimizer.step();
//   status = average.Update(0.999);
//   status = average.InModel([&] { return Evaluate(*model); });

// The averages of a model's shards. Thread-compatible. Do not call it between a
// forward and its backward. The average takes as much memory as the shards, in
// float32 if their precision is lower, and is on their device even if they rest
// on an SSD.
class WeightAverage {
 public:
  // `parameters` are the leaves that an optimizer steps. Those that do not
  // require gradients at this time are left out.
  explicit WeightAverage(const std::vector<at::Tensor>& parameters);

  // Makes the average decay * average + (1 - decay) * weights. Call it after
  // the optimizer's step. The first call copies the weights. InvalidArgument:
  // `decay` is not between 0 and 1.
  absl::Status Update(double decay);

  // Runs `fn` while the model has the averaged weights, and then puts the
  // trained ones back, whatever `fn` returns or throws. Before the first
  // Update() both are the same. FailedPrecondition: InModel(), Update() or
  // saving inside `fn`. If the SSD on which weights rest fails, the model may
  // have some of both: load a checkpoint.
  absl::Status InModel(FallibleRef fn);
  bool is_in_model() const { return is_in_model_; }  // during InModel()

  // Returns the average of `parameter`, for checkpoints. Before the first
  // Update() it is the parameter; if that is left out, it is undefined.
  at::Tensor Of(const at::Tensor& parameter) const;
  // Returns the average of `parameter`, to be overwritten, and makes averages
  // if there are none.
  absl::StatusOr<at::Tensor> ToFill(const at::Tensor& parameter);

  // Returns whether there are averages, and drops them, so that the next
  // Update() is the first one.
  bool has_begun() const { return !averages_.empty(); }
  void Forget() { averages_.clear(); }

 private:
  absl::Status Exchange(size_t count, size_t* done);

  std::vector<at::Tensor> parameters_;
  std::map<const void*, size_t> indices_;  // in parameters_
  std::vector<at::Tensor> averages_;       // empty before the first Update()
  // Weights of a dtype other than their average's, while that is in the model.
  std::vector<at::Tensor> weights_;
  bool is_in_model_ = false;
};

}  // namespace fsdp

#endif  // FSDP_OPTIM_TRAINING_STEP_H_
