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
#ifndef FSDP_OPTIM_GRAD_SCALER_H_
#define FSDP_OPTIM_GRAD_SCALER_H_

#include <ATen/core/Tensor.h>

#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "ranges/tensor_range.h"

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace fsdp {

// They are the same on all ranks.
struct GradScalerOptions {
  bool enabled = true;  // false: losses and gradients are left alone
  float init_scale = 65536;
  float growth_factor = 2;    // > 1
  float backoff_factor = .5;  // between 0 and 1
  // The scale grows after this many steps in a row without infinity or NaN.
  int growth_interval = 2000;

  // Longest wait of the host. Positive; if unset, the communicator's.
  std::optional<absl::Duration> timeout = std::nullopt;
};

// The state that a checkpoint saves.
struct GradScalerState {
  float scale;
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

  bool enabled() const { return options_.enabled; }
  float scale() const { return enabled() ? state_.scale : 1; }

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

}  // namespace fsdp

#endif  // FSDP_OPTIM_GRAD_SCALER_H_
