#include "fsdp/optim/fused_optimizer.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>

#include <type_traits>
#include <utility>

#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/optim/fused_runs.h"
#include "fsdp/optim/fused_stepper.h"

namespace fsdp {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;
using torch::optim::SGDOptions;
using torch::optim::SGDParamState;
using Slots = FusedRule::Slots;

template <typename Options>
bool EqualButRates(const OptimizerOptions& a, const OptimizerOptions& b) {
  Options same_rate = static_cast<const Options&>(a);
  same_rate.set_lr(b.get_lr());
  return same_rate == static_cast<const Options&>(b);
}

template <typename Options, typename State>
class AdamRule final : public FusedRule {
 public:
  explicit AdamRule(const FusedOptions& fused) : fused_(fused) {}

  at::ScalarType KernelDtype(at::ScalarType dtype,
                             at::Device /*device*/) const override {
    return dtype;
  }
  int NumSlots(const OptimizerOptions& options) const override {
    return static_cast<const Options&>(options).amsgrad() ? 3 : 2;
  }
  std::unique_ptr<OptimizerParamState> NewState() const override {
    return std::make_unique<State>();
  }
  Slots SlotsOf(OptimizerParamState& state) const override {
    State& adam = static_cast<State&>(state);
    return {&adam.exp_avg(), &adam.exp_avg_sq(), &adam.max_exp_avg_sq()};
  }
  int64_t NextStep(OptimizerParamState& state) const override {
    return static_cast<State&>(state).step() + 1;
  }
  void SetStep(OptimizerParamState& state, int64_t step) const override {
    static_cast<State&>(state).step(step);
  }
  void Call(const FusedLists& lists, const OptimizerOptions& options,
            bool /*first*/, const at::Tensor& rate) const override {
    const Options& adam = static_cast<const Options&>(options);
    const auto [beta1, beta2] = adam.betas();
    const auto call = [&, b1 = beta1, b2 = beta2](const auto& lr) {
      const auto with = [&](auto kernel) {
        kernel(lists.parameters, lists.gradients, lists.slots[0],
               lists.slots[1], lists.slots[2], lists.steps, lr, b1, b2,
               adam.weight_decay(), adam.eps(), adam.amsgrad(),
               fused_.maximize);
      };
      if constexpr (std::is_same_v<Options, torch::optim::AdamWOptions>) {
        with([](const auto&... arguments) { at::_fused_adamw_(arguments...); });
      } else {
        with([](const auto&... arguments) { at::_fused_adam_(arguments...); });
      }
    };
    if (rate.defined()) {
      call(rate);
    } else {
      call(adam.lr());
    }
  }
  bool SameButRates(const OptimizerOptions& a,
                    const OptimizerOptions& b) const override {
    return EqualButRates<Options>(a, b);
  }

 private:
  const FusedOptions fused_;
};

class SgdRule final : public FusedRule {
 public:
  explicit SgdRule(const FusedOptions& fused) : fused_(fused) {}

  // Torch's CPU kernel does not update the whole vectors of half-precision
  // types.
  at::ScalarType KernelDtype(at::ScalarType dtype,
                             at::Device device) const override {
    return device.is_cpu() ? at::toOpMathType(dtype) : dtype;
  }
  int NumSlots(const OptimizerOptions& options) const override {
    return static_cast<const SGDOptions&>(options).momentum() == 0 ? 0 : 1;
  }
  std::unique_ptr<OptimizerParamState> NewState() const override {
    return std::make_unique<SGDParamState>();
  }
  Slots SlotsOf(OptimizerParamState& state) const override {
    return {&static_cast<SGDParamState&>(state).momentum_buffer()};
  }
  // Steps are not counted; the first one is known by its empty state.
  int64_t NextStep(OptimizerParamState& state) const override {
    return SlotsOf(state)[0]->defined() ? 2 : 1;
  }
  void SetStep(OptimizerParamState& /*state*/,
               int64_t /*step*/) const override {}
  void Call(const FusedLists& lists, const OptimizerOptions& options,
            bool first, const at::Tensor& rate) const override {
    const auto& sgd = static_cast<const SGDOptions&>(options);
    const auto call = [&](const auto& lr) {
      at::_fused_sgd_(lists.parameters, lists.gradients, lists.slots[0],
                      sgd.weight_decay(), sgd.momentum(), lr, sgd.dampening(),
                      sgd.nesterov(), fused_.maximize,
                      /*is_first_step=*/first && sgd.momentum() != 0);
    };
    if (rate.defined()) {
      call(rate);
    } else {
      call(sgd.lr());
    }
  }
  bool SameButRates(const OptimizerOptions& a,
                    const OptimizerOptions& b) const override {
    return EqualButRates<SGDOptions>(a, b);
  }

 private:
  const FusedOptions fused_;
};

template <typename Options>
std::unique_ptr<const FusedRule> MakeRule(const FusedOptions& fused) {
  namespace optim = torch::optim;
  if constexpr (std::is_same_v<Options, SGDOptions>) {
    return std::make_unique<SgdRule>(fused);
  } else if constexpr (std::is_same_v<Options, optim::AdamOptions>) {
    return std::make_unique<AdamRule<Options, optim::AdamParamState>>(fused);
  } else {
    return std::make_unique<AdamRule<Options, optim::AdamWParamState>>(fused);
  }
}

// Returns `defaults` after LibTorch's own checks, which are in a constructor.
template <typename Base, typename Options>
const Options& Checked(const Options& defaults) {
  const absl::Status made = TorchToStatus("an optimizer's options", [&] {
    Base(std::vector<OptimizerParamGroup>(), defaults);
  });
  if (made.ok()) return defaults;
  throw StatusError(absl::InvalidArgumentError(made.message()));
}

}  // namespace

template <typename Base, typename Options>
FusedOptimizer<Base, Options>::FusedOptimizer(
    const std::vector<OptimizerParamGroup>& groups, const Options& defaults,
    const FusedOptions& fused)
    : Base(groups, Checked<Base>(defaults)),
      activity_(fused.activity),
      stepper_(std::make_unique<FusedStepper>(MakeRule<Options>(fused))) {}

template <typename Base, typename Options>
FusedOptimizer<Base, Options>::FusedOptimizer(
    std::vector<at::Tensor> parameters, const Options& defaults,
    const FusedOptions& fused)
    : FusedOptimizer({OptimizerParamGroup(std::move(parameters))}, defaults,
                     fused) {}

template <typename Base, typename Options>
FusedOptimizer<Base, Options>::FusedOptimizer(FusedOptimizer&&) noexcept =
    default;

template <typename Base, typename Options>
FusedOptimizer<Base, Options>::~FusedOptimizer() = default;

template <typename Base, typename Options>
// NOLINTNEXTLINE(google-default-arguments): as LibTorch declares it.
at::Tensor FusedOptimizer<Base, Options>::step(LossClosure closure) {
  at::Tensor loss;
  if (closure != nullptr) {
    const c10::AutoGradMode with_grad(true);
    loss = closure();
  }
  const comm::PhaseScope phase(activity_, comm::Phase::kStep, "");
  ThrowIfError(stepper_->Step(*this));
  return loss;
}

template <typename Base, typename Options>
absl::Status FusedOptimizer<Base, Options>::StepUnit(
    absl::Span<const TensorRange> unit) {
  return TorchToStatus("optimizer step",
                       [&] { return stepper_->StepShards(unit, *this); });
}

template <typename Base, typename Options>
absl::Status FusedOptimizer<Base, Options>::TakeUpStatesOf(
    absl::Span<const at::Tensor> parameters) {
  return TorchToStatus("taking up optimizer states", [&] {
    return stepper_->TakeUpStatesOf(parameters, *this);
  });
}

template <typename Base, typename Options>
void FusedOptimizer<Base, Options>::KeepRatesOnDevice() {
  stepper_->KeepRatesOnDevice();
}

template <typename Base, typename Options>
absl::StatusOr<int64_t> FusedOptimizer<Base, Options>::BeginCapture() {
  absl::StatusOr<int64_t> capture;
  FSDP_RETURN_IF_ERROR(
      TorchToStatus("beginning to capture optimizer steps",
                    [&] { capture = stepper_->BeginCapture(*this); }));
  return capture;
}

template <typename Base, typename Options>
void FusedOptimizer<Base, Options>::EndCapture() {
  stepper_->EndCapture(*this);
}

template <typename Base, typename Options>
absl::Status FusedOptimizer<Base, Options>::PrepareReplay(int64_t capture) {
  return TorchToStatus("replaying an optimizer step",
                       [&] { return stepper_->PrepareReplay(capture, *this); });
}

template <typename Base, typename Options>
void FusedOptimizer<Base, Options>::CountReplay() {
  stepper_->CountReplay(*this);
}

// Copies each tensor: an archive would write the storage that slots share once
// for each of them.
template <typename Base, typename Options>
void FusedOptimizer<Base, Options>::save(
    torch::serialize::OutputArchive& archive) const {
  Base plain(this->param_groups(),
             static_cast<const Options&>(this->defaults()));
  for (const auto& [parameter, state] : this->state()) {
    std::unique_ptr<OptimizerParamState> copy = state->clone();
    for (at::Tensor* slot : stepper_->rule().SlotsOf(*copy)) {
      if (slot == nullptr || !slot->defined()) continue;
      const Resident resident = ValueOrThrow(Resident::Of(*slot, Use::kRead));
      *slot = slot->clone();
    }
    plain.state()[parameter] = std::move(copy);
  }
  plain.save(archive);
}

template class FusedOptimizer<torch::optim::AdamW, torch::optim::AdamWOptions>;
template class FusedOptimizer<torch::optim::Adam, torch::optim::AdamOptions>;
template class FusedOptimizer<torch::optim::SGD, torch::optim::SGDOptions>;

}  // namespace fsdp
