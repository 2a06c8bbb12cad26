#include "fsdp/optim/training_step.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "comm/agreement.h"
#include "comm/rank_activity.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/optim/shard_gradients.h"

namespace fsdp {
namespace {

absl::Status CheckTimeout(absl::string_view what,
                          std::optional<absl::Duration> timeout) {
  if (!timeout.has_value() || *timeout > absl::ZeroDuration()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": the timeout is ", absl::FormatDuration(*timeout),
                   "; leave it unset for the communicator's"));
}

// --- Clipping ----------------------------------------------------------------

// Returns this rank's part of the sum of |g|^p, or of the maximum, in float64,
// which holds powers that float32 does not.
at::Tensor LocalTotal(const std::vector<GradientGroup>& groups, double p,
                      at::Device device) {
  at::Tensor total =
      at::zeros({1}, at::TensorOptions(at::kDouble).device(device));
  for (const GradientGroup& group : groups) {
    std::vector<at::Tensor> each;
    ThrowIfError(ForEachInMemory(
        group.each, Use::kRead, [&](const std::vector<at::Tensor>& gradients) {
          for (at::Tensor& norm :
               at::_foreach_norm(gradients, p, group.math_dtype())) {
            each.push_back(std::move(norm));
          }
        }));
    const at::Tensor norms = at::stack(each).to(device, at::kDouble);
    if (std::isinf(p)) {
      total = at::maximum(total, norms.max());
    } else {
      total += norms.pow(p).sum() / group.replicas;
    }
  }
  return total;
}

absl::Status CheckFinite(comm::Communicator& world, const at::Tensor& norm,
                         absl::Span<const TensorRange> shards,
                         const std::string& what) {
  const double value = norm.item<double>();
  if (std::isfinite(value)) return absl::OkStatus();
  FSDP_ASSIGN_OR_RETURN(const NotFinite first,
                        FindNotFinite(&world, shards, what));
  return comm::AsAgreed(absl::FailedPreconditionError(
      absl::StrCat(what, ": the norm is ", value, ": ",
                   first.gradient.empty()
                       ? "gradients are finite, but too large for it"
                       : absl::StrCat("the gradient of ", first.gradient,
                                      " is the first one that is not finite"),
                   ". No gradient was changed: skip this step, or clip without "
                   "error_if_nonfinite")));
}

void Scale(const std::vector<GradientGroup>& groups, const at::Tensor& norm,
           double max_norm) {
  const at::Tensor coefficient =
      (max_norm / (norm + 1e-6)).clamp_max(1.0).reshape({});
  for (const GradientGroup& group : groups) {
    const at::Tensor factor = coefficient.to(group.device, group.math_dtype());
    ThrowIfError(ForEachInMemory(group.gradients, Use::kUpdate,
                                 [&](const std::vector<at::Tensor>& gradients) {
                                   at::_foreach_mul_(gradients, factor);
                                 }));
    CountWrites(group);
  }
}

// Returns the largest norm, or NaN if one is. A maximum of NCCL passes over a
// NaN, so that a second number says that there is one.
at::Tensor LargestOfAll(comm::Communicator& world, const at::Tensor& norm,
                        std::optional<absl::Duration> timeout,
                        const std::string& what) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor numbers =
      at::cat({norm.nan_to_num(/*nan=*/0, /*posinf=*/kInfinity),
               norm.isnan().to(norm.scalar_type())});
  ThrowIfError(
      ReduceNumber(world, numbers, comm::ReduceOp::kMax, what, timeout));
  return numbers[0].masked_fill(numbers[1] > 0,
                                std::numeric_limits<double>::quiet_NaN());
}

at::Tensor ClipOrThrow(comm::Communicator& world,
                       absl::Span<const TensorRange> shards,
                       const ClipGradNormOptions& options,
                       const std::string& what) {
  c10::NoGradGuard no_grad;
  const double p = options.norm_type;
  const std::vector<GradientGroup> groups = GroupGradients(shards);
  at::Tensor norm;
  ThrowIfError(OrAbort(
      world, what, [&] { norm = LocalTotal(groups, p, DeviceOf(shards)); }));
  if (std::isinf(p)) {
    norm = LargestOfAll(world, norm, options.timeout, what);
  } else {
    ThrowIfError(
        ReduceNumber(world, norm, comm::ReduceOp::kSum, what, options.timeout));
    norm = norm.pow(1.0 / p);
  }
  if (options.error_if_nonfinite) {
    ThrowIfError(CheckFinite(world, norm, shards, what));
  }
  if (!std::isinf(options.max_norm)) {
    ThrowIfError(
        OrAbort(world, what, [&] { Scale(groups, norm, options.max_norm); }));
  }
  const bool any_double =
      std::any_of(shards.begin(), shards.end(), [](const TensorRange& named) {
        return named.values.scalar_type() == at::kDouble;
      });
  return norm.to(any_double ? at::kDouble : at::kFloat).reshape({});
}

}  // namespace

absl::StatusOr<at::Tensor> ClipGradNorm(comm::Communicator& world,
                                        absl::Span<const TensorRange> shards,
                                        const ClipGradNormOptions& options) {
  // As the all-reduce's label, this shows ranks with different options to
  // backends that compare calls.
  const std::string what =
      absl::StrCat("clipping gradients to a ", options.norm_type, "-norm of ",
                   options.max_norm);
  // This form refuses NaN.
  if (!(options.max_norm > 0 && options.norm_type > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": both numbers must be positive"));
  }
  FSDP_RETURN_IF_ERROR(CheckTimeout(what, options.timeout));
  at::Tensor norm;
  FSDP_RETURN_IF_ERROR(TorchToStatus(
      what, [&] { norm = ClipOrThrow(world, shards, options, what); }));
  return norm;
}

// --- Scaling of losses -------------------------------------------------------
namespace {

bool IsScale(float value) { return value > 0 && std::isfinite(value); }

// Divides by `scale`. Returns 1 if a gradient of this rank was not finite, else
// 0.
at::Tensor UnscaleLocally(absl::Span<const TensorRange> shards, float scale) {
  c10::NoGradGuard no_grad;
  const at::Device device = DeviceOf(shards);
  at::Tensor found_inf =
      at::zeros({1}, at::TensorOptions(at::kFloat).device(device));
  for (GradientGroup& group : GroupGradients(shards)) {
    const auto options = at::TensorOptions(at::kFloat).device(group.device);
    at::Tensor found = at::zeros({1}, options);
    const at::Tensor inverse = at::full({1}, 1 / scale, options);
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
  FSDP_RETURN_IF_ERROR(CheckTimeout("gradient scaler", options.timeout));
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

// --- Learning rates ----------------------------------------------------------
WarmUpCosine::WarmUpCosine(torch::optim::Optimizer& optimizer,
                           const WarmUpCosineOptions& options)
    : LRScheduler(optimizer), steps_by_(optimizer), options_(options) {
  for (torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    peaks_.push_back(group.options().get_lr());
  }
  SetRates();
}

void WarmUpCosine::SetRates() {
  size_t i = 0;
  TORCH_CHECK(steps_by_.param_groups().size() == peaks_.size(),
              "the optimizer got groups after the schedule was made for it: "
              "add them before");
  for (torch::optim::OptimizerParamGroup& group : steps_by_.param_groups()) {
    group.options().set_lr(peaks_[i++] * At(int64_t{step_count_}, options_));
  }
}

double WarmUpCosine::At(int64_t step, const WarmUpCosineOptions& options) {
  if (step < options.warm_up) {
    return static_cast<double>(step + 1) / static_cast<double>(options.warm_up);
  }
  const auto left = static_cast<double>(
      std::max<int64_t>(options.steps - options.warm_up, 1));
  const double done =
      std::min(static_cast<double>(step - options.warm_up) / left, 1.0);
  const double cosine = 0.5 * (1 + std::cos(std::acos(-1.0) * done));
  return options.floor + (1 - options.floor) * cosine;
}

std::string WarmUpCosine::ToString() const {
  return absl::StrCat("WarmUpCosine: warm_up ", options_.warm_up, ", steps ",
                      options_.steps, ", floor ", options_.floor);
}

// Returns the rates of the next step: step_count_ counts those before this
// call.
std::vector<double> WarmUpCosine::get_lrs() {
  std::vector<double> rates = peaks_;
  for (double& rate : rates) rate *= At(int64_t{step_count_} + 1, options_);
  return rates;
}

// --- Averages ----------------------------------------------------------------
namespace {

at::Tensor NewAverage(const at::Tensor& parameter) {
  return at::empty_like(parameter.detach(),
                        parameter.options().requires_grad(false).dtype(
                            at::toOpMathType(parameter.scalar_type())));
}

absl::Status InModelError() {
  return absl::FailedPreconditionError(
      "WeightAverage: the average is in the model until InModel() ends");
}

}  // namespace

WeightAverage::WeightAverage(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.requires_grad()) continue;
    indices_[parameter.unsafeGetTensorImpl()] = parameters_.size();
    parameters_.push_back(parameter);
  }
}

absl::Status WeightAverage::Update(double decay) {
  if (!(decay >= 0 && decay <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("WeightAverage: a decay of ", decay,
                     " is not between 0 and 1; 0.999 is usual"));
  }
  if (is_in_model_) return InModelError();
  return TorchToStatus("averaging the weights", [&] {
    const c10::NoGradGuard no_grad;
    std::vector<at::Tensor> averages;  // that one operator can take
    std::vector<at::Tensor> parameters;
    const bool is_first = averages_.empty();
    std::vector<at::Tensor> all = averages_;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor parameter = parameters_[i].detach();
      if (is_first) all.push_back(NewAverage(parameter));
      at::Tensor& average = all[i];
      if (!is_first && !RestsElsewhere(parameter) &&
          parameter.scalar_type() == average.scalar_type()) {
        averages.push_back(average);
        parameters.push_back(parameter);
        continue;
      }
      const Resident resident =
          ValueOrThrow(Resident::Of(parameter, Use::kRead));
      if (is_first) {
        average.copy_(parameter);
      } else {
        average.lerp_(parameter.to(average.scalar_type()), 1 - decay);
      }
    }
    if (!averages.empty()) at::_foreach_lerp_(averages, parameters, 1 - decay);
    // Reading a parameter may fail, so this waits until all of them are read.
    averages_ = std::move(all);
  });
}

absl::Status WeightAverage::InModel(FallibleRef fn) {
  if (is_in_model_) return InModelError();
  size_t exchanged = 0;
  absl::Status status = Exchange(averages_.size(), &exchanged);
  is_in_model_ = true;
  if (status.ok()) status = TorchToStatus("using averaged weights", fn);
  const absl::Status back = Exchange(exchanged, &exchanged);
  is_in_model_ = false;
  return status.ok() ? back : status;
}

at::Tensor WeightAverage::Of(const at::Tensor& parameter) const {
  const auto found = indices_.find(parameter.unsafeGetTensorImpl());
  if (found == indices_.end()) return at::Tensor();
  return averages_.empty() ? parameter.detach() : averages_[found->second];
}

absl::StatusOr<at::Tensor> WeightAverage::ToFill(const at::Tensor& parameter) {
  if (averages_.empty()) FSDP_RETURN_IF_ERROR(Update(/*decay=*/0));
  return Of(parameter);
}

// Swaps the first `count` weights and averages; a second call swaps them back.
// `done` becomes the number of those that are swapped.
absl::Status WeightAverage::Exchange(size_t count, size_t* done) {
  *done = 0;
  return TorchToStatus("exchanging weights and their average", [&] {
    const c10::NoGradGuard no_grad;
    const std::vector<at::Tensor> weights = std::exchange(weights_, {});
    size_t next = 0;
    for (size_t i = 0; i < count; ++i, ++*done) {
      const at::Tensor parameter = parameters_[i].detach();
      const Resident resident =
          ValueOrThrow(Resident::Of(parameter, Use::kUpdate));
      at::Tensor& average = averages_[i];
      if (parameter.scalar_type() == average.scalar_type()) {
        const at::Tensor held = parameter.clone();
        parameter.copy_(average);
        average.copy_(held);
      } else if (is_in_model_) {
        parameter.copy_(weights[next++]);
      } else {
        weights_.push_back(parameter.clone());
        parameter.copy_(average);
      }
    }
  });
}

}  // namespace fsdp
