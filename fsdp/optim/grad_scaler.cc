#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "comm/rank_activity.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/optim/shard_gradients.h"
#include "fsdp/optim/training_step.h"
#include "ranges/tensor_range.h"

namespace fsdp {
namespace {

bool IsScale(float value) { return value > 0 && std::isfinite(value); }

// Divides by `scale`. Returns 1 if a gradient of this rank was not finite, else
// 0.
at::Tensor UnscaleLocally(absl::Span<const TensorRange> shards, float scale) {
  c10::NoGradGuard no_grad;
  const at::Device device = DeviceOf(shards);
  const auto options = [](at::Device device) {
    return at::TensorOptions(at::kFloat).device(device);
  };
  at::Tensor found_inf = at::zeros({1}, options(device));
  for (GradientGroup& group : GroupGradients(shards)) {
    at::Tensor found = at::zeros({1}, options(group.device));
    const at::Tensor inverse = at::full({1}, 1 / scale, options(group.device));
    ThrowIfError(
        ForEachInMemory(group.gradients, Use::kUpdate,
                        [&](const std::vector<at::Tensor>& gradients) {
                          at::_amp_foreach_non_finite_check_and_unscale_(
                              gradients, found, inverse);
                        }));
    CountWrites(group);
    found_inf = at::maximum(found_inf, found.to(device));
  }
  return found_inf;
}

}  // namespace

absl::StatusOr<ShardedGradScaler> ShardedGradScaler::Create(
    comm::Communicator& world, const GradScalerOptions& options) {
  // This form refuses NaN.
  const bool valid = IsScale(options.init_scale) && options.growth_factor > 1 &&
                     std::isfinite(options.growth_factor) &&
                     options.backoff_factor > 0 && options.backoff_factor < 1 &&
                     options.growth_interval > 0;
  if (options.timeout.has_value() && *options.timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradient scaler: the timeout is ",
                     absl::FormatDuration(*options.timeout),
                     "; leave it unset for the communicator's"));
  }
  if (valid) return ShardedGradScaler(world, options);
  return absl::InvalidArgumentError(absl::StrCat(
      "gradient scaler: init_scale ", options.init_scale, ", growth_factor ",
      options.growth_factor, ", backoff_factor ", options.backoff_factor,
      ", growth_interval ", options.growth_interval,
      "; they must be positive and finite, the growth factor above 1 and the "
      "backoff factor below"));
}

at::Tensor ShardedGradScaler::Scale(const at::Tensor& loss) const {
  return enabled() ? loss * state_.scale : loss;
}

absl::StatusOr<bool> ShardedGradScaler::Unscale(
    absl::Span<const TensorRange> shards) {
  if (!enabled()) return false;
  if (stage_ != Stage::kScaled) {
    return absl::FailedPreconditionError(
        "Unscale() a second time since the last Update(): the gradients would "
        "be divided twice");
  }
  // As the all-reduce's label, this shows ranks with different scales to
  // backends that compare calls.
  const std::string what =
      absl::StrCat("unscaling gradients by ", state_.scale);
  // After an error, Step() must not use gradients that only some ranks have.
  stage_ = Stage::kUnscaled;
  found_inf_ = true;
  at::Tensor found_inf;
  FSDP_RETURN_IF_ERROR(OrAbort(*world_, what, [&] {
    found_inf = UnscaleLocally(shards, state_.scale);
  }));
  FSDP_RETURN_IF_ERROR(ReduceNumber(*world_, found_inf, comm::ReduceOp::kMax,
                                    what, options_.timeout));
  FSDP_RETURN_IF_ERROR(
      TorchToStatus(what, [&] { found_inf_ = found_inf.item<float>() != 0; }));
  return found_inf_;
}

absl::StatusOr<bool> ShardedGradScaler::Step(
    FallibleRef step, absl::Span<const TensorRange> shards) {
  if (stage_ == Stage::kUnscaledByStep) {
    return absl::FailedPreconditionError(
        "Step() a second time since the last Update(): with several "
        "optimizers, Unscale() all shards before the first Step()");
  }
  if (enabled() && stage_ == Stage::kScaled) {
    FSDP_RETURN_IF_ERROR(Unscale(shards).status());
    stage_ = Stage::kUnscaledByStep;
  }
  if (found_inf_) return false;
  const comm::PhaseScope phase(world_->activity(), comm::Phase::kStep, "");
  FSDP_RETURN_IF_ERROR(TorchToStatus("optimizer step", step));
  return true;
}

absl::StatusOr<bool> ShardedGradScaler::Step(
    torch::optim::Optimizer& optimizer, absl::Span<const TensorRange> shards) {
  return Step([&optimizer] { optimizer.step(); }, shards);
}

absl::Status ShardedGradScaler::Update() {
  if (!enabled()) return absl::OkStatus();
  if (stage_ == Stage::kScaled) {
    return absl::FailedPreconditionError(
        "Update() of the scale without Unscale() or Step() before it: nothing "
        "is known of the gradients");
  }
  stage_ = Stage::kScaled;
  if (found_inf_) {
    // The inverse of the smallest normal number is finite, that of zero is not.
    state_ = {std::max(state_.scale * options_.backoff_factor,
                       std::numeric_limits<float>::min()),
              0};
  } else if (++state_.growth_tracker >= options_.growth_interval) {
    const float grown = state_.scale * options_.growth_factor;
    state_ = {std::isfinite(grown) ? grown : state_.scale, 0};
  }
  found_inf_ = false;
  return absl::OkStatus();
}

absl::Status ShardedGradScaler::SetState(const GradScalerState& state) {
  if (!IsScale(state.scale) || state.growth_tracker < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "state of a gradient scaler: scale ", state.scale, ", growth tracker ",
        state.growth_tracker,
        "; a scale is positive and finite, a number of steps not negative"));
  }
  state_ = state;
  return absl::OkStatus();
}

}  // namespace fsdp
