// Loss scaling for training in float16, whose small gradients would be zero.
//
//   fsdp::ShardedGradScaler scaler = fsdp::ValueOrThrow(
//       fsdp::ShardedGradScaler::Create(model->communicator()));
//   for each batch:
//     status = model->Backward(scaler.Scale(loss));
//     found_inf = scaler.Unscale(model->NamedShards());   // to clip, say
//     norm = model->ClipGradNorm(1.0);
//     stepped = scaler.Step(optimizer, model->NamedShards());
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
#include "fsdp/model/named_shard.h"

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace fsdp {

// The same on all ranks.
struct GradScalerOptions {
  bool enabled = true;  // false: losses and gradients are left alone
  float init_scale = 65536;
  float growth_factor = 2;    // > 1
  float backoff_factor = .5;  // between 0 and 1
  // Steps in a row without infinity or NaN after which the scale grows.
  int growth_interval = 2000;

  // Longest wait of the host; positive. Unset: the communicator's default.
  std::optional<absl::Duration> timeout = std::nullopt;
};

// For a checkpoint.
struct GradScalerState {
  float scale;
  int growth_tracker;  // steps since the scale has changed
};

// torch.amp.GradScaler over ranks: the scale is the same on all of them, and a
// step is skipped by all when a gradient of one is infinite or NaN. All ranks
// make the same calls.
class ShardedGradScaler {
 public:
  // `world`, all ranks that hold a part of the model, outlives the scaler.
  // InvalidArgument: numbers outside the ranges above.
  static absl::StatusOr<ShardedGradScaler> Create(
      comm::Communicator& world,
      const GradScalerOptions& options = GradScalerOptions());

  // loss * scale().
  at::Tensor Scale(const at::Tensor& loss) const;

  // Divides the gradients by scale() and returns whether one of any rank was
  // infinite or NaN. One all-reduce. FailedPrecondition: already called since
  // the last Update().
  absl::StatusOr<bool> Unscale(absl::Span<const NamedShard> shards);

  // Calls `step` unless a gradient was infinite or NaN; returns whether it did,
  // or the error that `step` has returned.
  // Unscales `shards` first unless that is done. Several optimizers: Unscale()
  // all shards, then Step() each; FailedPrecondition where a Step() that had
  // to unscale is followed by another.
  absl::StatusOr<bool> Step(FallibleRef step,
                            absl::Span<const NamedShard> shards);
  absl::StatusOr<bool> Step(torch::optim::Optimizer& optimizer,
                            absl::Span<const NamedShard> shards);

  // Ends the step: lowers the scale if it was skipped, raises it after
  // growth_interval others. FailedPrecondition: nothing was unscaled.
  absl::Status Update();

  bool enabled() const { return options_.enabled; }
  // 1 where the scaler is not enabled.
  float scale() const { return enabled() ? state_.scale : 1; }

  const GradScalerState& state() const { return state_; }
  // InvalidArgument: a scale that is not positive and finite, or a negative
  // number of steps.
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
  bool found_inf_ = false;  // of the gradients that are unscaled
};

}  // namespace fsdp

#endif  // FSDP_OPTIM_GRAD_SCALER_H_
