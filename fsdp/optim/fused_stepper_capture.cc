// Captured steps: what the host decides in a step is in the device's memory,
// where PrepareReplay() writes it for a replay.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "fsdp/optim/fused_stepper.h"

namespace fsdp {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

// Returns an undefined tensor if kernels are to take the options' number.
const at::Tensor& FusedStepper::RateOf(Batch& batch,
                                       const OptimizerOptions& options) {
  if (!rates_on_device_) return batch.rate;
  const double value = options.get_lr();
  if (!batch.rate.defined()) {
    batch.rate =
        at::full({}, value, at::TensorOptions(at::kFloat).device(batch.device));
  } else if (batch.rate_value != value && !captured_.is_under_way) {
    batch.rate.fill_(value);
  }
  if (!captured_.is_under_way) batch.rate_value = value;
  return batch.rate;
}

absl::StatusOr<int64_t> FusedStepper::BeginCapture(const Groups& groups,
                                                   OptimizerStates& states) {
  const c10::NoGradGuard no_grad;
  FSDP_RETURN_IF_ERROR(Arrange(groups, states));
  const int64_t number = captured_.number + 1;
  captured_ = CapturedStep();
  captured_.number = number;
  captured_.parameters = arranged_;
  for (const OptimizerParamGroup& group : groups) {
    captured_.options.push_back(group.options().clone());
  }
  std::set<int64_t> numbers = {1};
  for (const auto& [parameter, state] : states) {
    numbers.insert(rule_->NextStep(*state));
  }
  for (Batch& batch : batches_) {
    if (!spaces_.empty()) {
      return absl::UnimplementedError(
          "what is offloaded is stepped by the host and cannot be captured");
    }
    const auto options = at::TensorOptions(at::kFloat).device(batch.device);
    while (batch.steps.size() < numbers.size()) {
      batch.steps.emplace_back(0, at::zeros({}, options));
    }
    batch.steps_in_use = 0;
    RateOf(batch, groups[batch.group].options());
  }
  captured_.is_under_way = true;
  return number;
}

absl::Status FusedStepper::NoteCaptured(Batch& batch,
                                        const FusedStretch& stretch) {
  for (const FusedSlice* slice : stretch.counted()) {
    if (slice->step == 1) {
      return absl::FailedPreconditionError(absl::StrCat(
          "the first step of a parameter in group ", batch.group,
          " cannot be captured: it makes the state. A parameter that gets a "
          "gradient later than others has to get it in a step before"));
    }
    void* const parameter = slice->parameter.unsafeGetTensorImpl();
    for (const CapturedState& captured : captured_.states) {
      if (captured.parameter != parameter) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "a captured step steps a parameter in group ", batch.group,
          " twice: capture one step of the optimizer at a time"));
    }
    captured_.states.push_back(
        {parameter, slice->slots, slice->step, StepNumber(batch, slice->step)});
  }
  return absl::OkStatus();
}

// Takes back the count of the captured step, which has not been executed.
void FusedStepper::EndCapture(OptimizerStates& states) {
  captured_.is_under_way = false;
  for (const CapturedState& captured : captured_.states) {
    const auto found = states.find(captured.parameter);
    if (found == states.end()) continue;
    rule_->SetStep(*found->second, captured.number - 1);
  }
}

absl::Status FusedStepper::CheckUnchanged(const Groups& groups) const {
  if (captured_.parameters != arranged_ || !IsArranged(groups)) {
    return absl::FailedPreconditionError(
        "the optimizer's parameters are not those of the captured step");
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    if (rule_->SameButRates(groups[i].options(), *captured_.options[i])) {
      continue;
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "options of the optimizer's group ", i,
        " have changed since the step was captured; only its learning rate "
        "may"));
  }
  return absl::OkStatus();
}

// Copies a state that was loaded since into the captured step's memory.
absl::Status FusedStepper::TakeUpCaptured(CapturedState& captured,
                                          OptimizerStates& states) {
  const auto found = states.find(captured.parameter);
  if (found == states.end()) {
    return absl::FailedPreconditionError(
        "a state of the captured step is gone from the optimizer");
  }
  OptimizerParamState& state = *found->second;
  captured.number = rule_->NextStep(state);
  const FusedRule::Slots slots = rule_->SlotsOf(state);
  for (int k = 0; k < kMaxFusedSlots; ++k) {
    at::Tensor& own = captured.slots[k];
    if (!own.defined() || slots[k] == nullptr || slots[k]->is_same(own)) {
      continue;
    }
    if (!slots[k]->defined() || slots[k]->sizes() != own.sizes()) {
      return absl::FailedPreconditionError(
          "a state that was loaded since the step was captured has no tensor "
          "of the captured one's sizes");
    }
    own.copy_(*slots[k]);
    *slots[k] = own;
  }
  return absl::OkStatus();
}

absl::Status FusedStepper::PrepareReplay(int64_t capture, const Groups& groups,
                                         OptimizerStates& states) {
  const c10::NoGradGuard no_grad;
  if (capture != captured_.number) {
    return absl::FailedPreconditionError(
        "the optimizer's step was captured again since, by another "
        "CapturedStep: one of them at a time can be replayed");
  }
  FSDP_RETURN_IF_ERROR(CheckUnchanged(groups));
  for (CapturedState& captured : captured_.states) {
    FSDP_RETURN_IF_ERROR(TakeUpCaptured(captured, states));
  }
  // Parameters that had the same number at the capture share its tensor.
  std::vector<std::pair<const void*, int64_t>> filled;
  for (const CapturedState& captured : captured_.states) {
    const void* const step = captured.step.unsafeGetTensorImpl();
    bool is_filled = false;
    for (const auto& [tensor, number] : filled) {
      if (tensor != step) continue;
      is_filled = true;
      if (number == captured.number) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "parameters that were stepped together when the step was captured "
          "come to steps ",
          number, " and ", captured.number));
    }
    if (is_filled) continue;
    captured.step.fill_(captured.number);
    filled.emplace_back(step, captured.number);
  }
  for (Batch& batch : batches_) RateOf(batch, groups[batch.group].options());
  return absl::OkStatus();
}

void FusedStepper::CountReplay(OptimizerStates& states) {
  for (const CapturedState& captured : captured_.states) {
    const auto found = states.find(captured.parameter);
    if (found != states.end()) rule_->SetStep(*found->second, captured.number);
  }
}

}  // namespace fsdp
