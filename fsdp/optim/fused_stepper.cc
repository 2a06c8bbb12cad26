#include "fsdp/optim/fused_stepper.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <iterator>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/resting/offload_space.h"

namespace fsdp {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

void Append(const FusedRun& run, const at::Tensor& step, FusedLists& lists) {
  lists.parameters.push_back(run.parameter);
  lists.gradients.push_back(run.gradient);
  for (int k = 0; k < kMaxFusedSlots; ++k) {
    if (run.slots[k].defined()) lists.slots[k].push_back(run.slots[k]);
  }
  lists.steps.push_back(step);
}

}  // namespace

absl::Status FusedStepper::Step(Optimizer& optimizer) {
  absl::Status arranged = TorchToStatus("arranging parameters for a step",
                                        [&] { return Arrange(optimizer); });
  for (Batch& batch : batches_) {
    batch.due.clear();
    for (FusedStretch& stretch : batch.stretches) {
      if (stretch.HasGradient()) batch.due.push_back(&stretch);
    }
  }
  return StepDue(std::move(arranged), optimizer, /*all_or_nothing=*/true);
}

absl::Status FusedStepper::StepShards(absl::Span<const TensorRange> shards,
                                      Optimizer& optimizer) {
  FSDP_RETURN_IF_ERROR(Arrange(optimizer));
  for (Batch& batch : batches_) batch.due.clear();
  std::set<const void*> stepped;
  for (const TensorRange& named : shards) {
    stepped.insert(named.values.unsafeGetTensorImpl());
  }
  // Memory that ranks share is one stretch, with the shards of other units.
  std::vector<std::pair<at::Tensor, at::Tensor>> others;
  const absl::Cleanup give_back = [&others] {
    for (const auto& [parameter, gradient] : others) {
      parameter.mutable_grad() = gradient;
    }
  };
  for (const TensorRange& named : shards) {
    const auto place = places_.find(named.values.unsafeGetTensorImpl());
    if (place == places_.end() || !named.values.grad().defined()) continue;
    Batch& batch = batches_[place->second.batch];
    FusedStretch* stretch = &batch.stretches[place->second.stretch];
    // `shards` has the shards of one stretch one after the other.
    if (std::find(batch.due.rbegin(), batch.due.rend(), stretch) ==
        batch.due.rend()) {
      batch.due.push_back(stretch);
      absl::c_move(stretch->TakeGradients(stepped), std::back_inserter(others));
    }
  }
  FSDP_RETURN_IF_ERROR(
      StepDue(absl::OkStatus(), optimizer, /*all_or_nothing=*/false));
  for (const TensorRange& named : shards) {
    const bool ours = places_.count(named.values.unsafeGetTensorImpl()) > 0;
    if (ours) named.values.mutable_grad().reset();
  }
  return absl::OkStatus();
}

absl::Status FusedStepper::TakeUpStatesOf(
    absl::Span<const at::Tensor> parameters, Optimizer& optimizer) {
  const c10::NoGradGuard no_grad;
  FSDP_RETURN_IF_ERROR(Arrange(optimizer));
  std::set<std::pair<size_t, size_t>> done;
  for (const at::Tensor& parameter : parameters) {
    const auto place = places_.find(parameter.unsafeGetTensorImpl());
    if (place == places_.end()) continue;
    const auto [batch_number, stretch] = place->second;
    if (!done.insert({batch_number, stretch}).second) continue;
    Batch& batch = batches_[batch_number];
    const int num_slots = NumSlots(batch, optimizer);
    FSDP_RETURN_IF_ERROR(
        batch.stretches[stretch].TakeUp(num_slots, optimizer.state()));
  }
  return absl::OkStatus();
}

bool FusedStepper::IsArranged(const Optimizer& optimizer) const {
  size_t next = 0;
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    if (arranged_.size() - next < group.params().size() + 1) return false;
    for (const at::Tensor& parameter : group.params()) {
      if (arranged_[next++] != parameter.unsafeGetTensorImpl()) return false;
    }
    if (arranged_[next++] != nullptr) return false;
  }
  return next == arranged_.size();
}

absl::Status FusedStepper::Arrange(Optimizer& optimizer) {
  if (IsArranged(optimizer)) return absl::OkStatus();
  const c10::NoGradGuard no_grad;
  arranged_.clear();
  // Before anything can fail: a step that cannot be made is told by them.
  spaces_.clear();
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const RestingMemory* const memory = RestingMemory::Of(parameter);
      if (memory == nullptr || memory->space() == nullptr) continue;
      if (std::find(spaces_.begin(), spaces_.end(), memory->space()) ==
          spaces_.end()) {
        spaces_.push_back(memory->space());
      }
    }
  }
  for (Batch& batch : batches_) {
    for (FusedStretch& stretch : batch.stretches) {
      FSDP_RETURN_IF_ERROR(stretch.Evacuate(optimizer.state()));
    }
  }
  captured_.parameters.clear();  // its memory is gone
  batches_.clear();
  places_.clear();
  for (size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    FSDP_RETURN_IF_ERROR(ArrangeGroup(i, optimizer.param_groups()[i]));
  }
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      arranged_.push_back(parameter.unsafeGetTensorImpl());
    }
    arranged_.push_back(nullptr);
  }
  return absl::OkStatus();
}

absl::Status FusedStepper::ArrangeGroup(size_t index,
                                        const OptimizerParamGroup& group) {
  struct Storage {
    size_t batch;
    std::vector<std::pair<size_t, at::Tensor>> parameters;
  };
  std::vector<Storage> storages;
  std::unordered_map<const void*, size_t> storage_of;
  for (size_t i = 0; i < group.params().size(); ++i) {
    const at::Tensor& parameter = group.params()[i];
    FSDP_RETURN_IF_ERROR(
        Annotate(CheckFusedParameter(parameter),
                 absl::StrCat("stepping parameter ", i, " of group ", index)));
    const auto [entry, is_new] = storage_of.emplace(
        parameter.storage().unsafeGetStorageImpl(), storages.size());
    if (is_new) storages.push_back({BatchOf(index, parameter), {}});
    storages[entry->second].parameters.emplace_back(i, parameter);
  }
  for (Storage& storage : storages) {
    std::vector<FusedStretch>& stretches = batches_[storage.batch].stretches;
    for (const auto& [i, parameter] : storage.parameters) {
      places_[parameter.unsafeGetTensorImpl()] = {storage.batch,
                                                  stretches.size()};
    }
    stretches.emplace_back(*rule_, index, std::move(storage.parameters));
  }
  return absl::OkStatus();
}

size_t FusedStepper::BatchOf(size_t group, const at::Tensor& parameter) {
  const at::Device device = SteppingDevice(parameter);
  const at::ScalarType dtype = parameter.scalar_type();
  const auto found =
      std::find_if(batches_.begin(), batches_.end(), [&](const Batch& batch) {
        return batch.group == group && batch.device == device &&
               batch.dtype == dtype;
      });
  const size_t index = found - batches_.begin();
  if (found == batches_.end()) batches_.push_back({group, device, dtype});
  return index;
}

int FusedStepper::NumSlots(const Batch& batch,
                           const Optimizer& optimizer) const {
  return rule_->NumSlots(optimizer.param_groups()[batch.group].options());
}

// Does first what may fail half-way, because it needs a store; the rest cannot
// fail.
absl::Status FusedStepper::StepDue(absl::Status status, Optimizer& optimizer,
                                   bool all_or_nothing) {
  const c10::NoGradGuard no_grad;
  for (const Batch& batch : batches_) {
    if (!status.ok()) break;  // they may be of other groups
    const int num_slots = NumSlots(batch, optimizer);
    for (const FusedStretch* stretch : batch.due) {
      if (status.ok()) status = stretch->Check(num_slots, optimizer.state());
    }
  }
  std::vector<Streamed> streamed;
  if (status.ok()) streamed = TakeStreamed();
  if (all_or_nothing && !spaces_.empty()) {
    if (status.ok()) status = ReserveDue(optimizer);
    // A rank that has nothing to step takes part too: the others wait for it.
    const absl::Status before = status;
    for (const auto& space : spaces_) {
      absl::Status begin = before;
      if (begin.ok()) begin = space->CheckStepper(identity_);
      status.Update(space->BeginStep(begin));
    }
    if (status.ok()) status = Stream(streamed, optimizer, /*save=*/true);
    const absl::Status mine = std::exchange(status, absl::OkStatus());
    for (const auto& space : spaces_) status.Update(space->EndStep(mine));
  } else if (status.ok()) {
    status = Stream(streamed, optimizer, /*save=*/false);
  }
  if (!status.ok()) {
    for (const Streamed& each : streamed) each.stretch->Undo(optimizer.state());
    return status;
  }
  if (all_or_nothing) {
    for (const Streamed& each : streamed) each.stretch->Count();
  }
  for (Batch& batch : batches_) {
    if (batch.due.empty()) continue;
    FSDP_RETURN_IF_ERROR(StepTogether(batch, batch.due, optimizer));
    for (FusedStretch* stretch : batch.due) stretch->Count();
  }
  return absl::OkStatus();
}

std::vector<FusedStepper::Streamed> FusedStepper::TakeStreamed() {
  std::vector<Streamed> streamed;
  for (Batch& batch : batches_) {
    const auto is_here = [](const FusedStretch* stretch) {
      return !stretch->RestsElsewhere();
    };
    const auto first =
        std::stable_partition(batch.due.begin(), batch.due.end(), is_here);
    for (auto i = first; i != batch.due.end(); ++i) {
      streamed.push_back({&batch, *i});
    }
    batch.due.erase(first, batch.due.end());
  }
  return streamed;
}

// Allocates before anything is stepped, so that nothing can fail half-way.
absl::Status FusedStepper::ReserveDue(const Optimizer& optimizer) {
  return TorchToStatus("allocating optimizer states", [&] {
    for (const Batch& batch : batches_) {
      const int num_slots = NumSlots(batch, optimizer);
      for (FusedStretch* stretch : batch.due) {
        ThrowIfError(stretch->Reserve(num_slots));
      }
    }
  });
}

absl::Status FusedStepper::Stream(absl::Span<const Streamed> streamed,
                                  Optimizer& optimizer, bool save) {
  constexpr size_t kAhead = 2;
  absl::Status status = TorchToStatus("optimizer step", [&] {
    for (size_t i = 0; i < streamed.size(); ++i) {
      const auto [batch, stretch] = streamed[i];
      if (i == 0) stretch->Prefetch();
      for (size_t j = i + 1; j <= i + kAhead && j < streamed.size(); ++j) {
        streamed[j].stretch->Prefetch();
      }
      RestingMemory& shard = *stretch->shard();
      if (save) ThrowIfError(shard.space()->SaveBeforeStep(shard));
      ThrowIfError(StepTogether(*batch, {stretch}, optimizer));
      if (!save) stretch->Count();
    }
  });
  // After an exception, stretches may still be in memory.
  if (!status.ok()) {
    for (const Streamed& each : streamed) each.stretch->LetGo();
  }
  return status;
}

absl::Status FusedStepper::StepTogether(
    Batch& batch, absl::Span<FusedStretch* const> stretches,
    Optimizer& optimizer) {
  if (!captured_.is_under_way) batch.steps_in_use = 0;
  absl::Status status = CallKernels(batch, stretches, optimizer);
  for (FusedStretch* stretch : stretches) {
    if (status.ok()) {
      stretch->Finish();
    } else {
      stretch->LetGo();
    }
  }
  return status;
}

absl::Status FusedStepper::CallKernels(
    Batch& batch, absl::Span<FusedStretch* const> stretches,
    Optimizer& optimizer) {
  const OptimizerOptions& options =
      optimizer.param_groups()[batch.group].options();
  const int num_slots = rule_->NumSlots(options);
  const at::ScalarType dtype = rule_->KernelDtype(batch.dtype, batch.device);
  std::array<FusedLists, 2> lists;  // runs after their first step, and in it
  for (FusedStretch* stretch : stretches) {
    FSDP_RETURN_IF_ERROR(stretch->Begin(num_slots, optimizer.state()));
    if (captured_.is_under_way) {
      FSDP_RETURN_IF_ERROR(NoteCaptured(batch, *stretch));
    }
    for (const FusedRun& run : stretch->runs()) {
      const int64_t step = stretch->StepOf(run);
      if (batch.dtype != dtype || run.gradient.scalar_type() != dtype) {
        CallConverted(batch, run, step, options);
      } else {
        Append(run, StepNumber(batch, step), lists[step == 1 ? 1 : 0]);
      }
    }
  }
  for (int first : {0, 1}) {
    if (lists[first].parameters.empty()) continue;
    rule_->Call(lists[first], options, first == 1, RateOf(batch, options));
  }
  return absl::OkStatus();
}

const at::Tensor& FusedStepper::StepNumber(Batch& batch, int64_t step) {
  for (size_t i = 0; i < batch.steps_in_use; ++i) {
    if (batch.steps[i].first == step) return batch.steps[i].second;
  }
  if (batch.steps_in_use == batch.steps.size()) {
    FSDP_CHECK(!captured_.is_under_way);
    batch.steps.emplace_back(
        0, at::zeros({}, at::TensorOptions(at::kFloat).device(batch.device)));
  }
  auto& [number, tensor] = batch.steps[batch.steps_in_use++];
  number = step;
  // A replay finds the number that PrepareReplay() has written.
  if (!captured_.is_under_way) tensor.fill_(step);
  return tensor;
}

void FusedStepper::CallConverted(Batch& batch, const FusedRun& run,
                                 int64_t step,
                                 const OptimizerOptions& options) {
  const at::ScalarType dtype = rule_->KernelDtype(batch.dtype, batch.device);
  const int64_t numel = run.parameter.numel();
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t rows = batch.dtype == dtype ? 1 : 2 + rule_->NumSlots(options);
  if (!batch.converted.defined() || batch.converted.size(0) < rows ||
      batch.converted.size(1) < bytes) {
    batch.converted = at::empty(
        {rows, bytes}, at::TensorOptions(at::kByte).device(batch.device));
  }
  int64_t used = 0;
  const auto convert = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.scalar_type() == dtype) return tensor;
    return batch.converted.select(0, used++)
        .narrow(0, 0, bytes)
        .view(dtype)
        .copy_(tensor);
  };
  FusedRun converted = run;
  converted.parameter = convert(run.parameter);
  converted.gradient = convert(run.gradient);
  for (int k = 0; k < kMaxFusedSlots; ++k) {
    converted.slots[k] = convert(run.slots[k]);
  }
  FusedLists single;
  Append(converted, StepNumber(batch, step), single);
  rule_->Call(single, options, step == 1, RateOf(batch, options));
  if (dtype == batch.dtype) return;
  run.parameter.copy_(converted.parameter);
  for (int k = 0; k < kMaxFusedSlots; ++k) {
    if (run.slots[k].defined()) run.slots[k].copy_(converted.slots[k]);
  }
}

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

absl::StatusOr<int64_t> FusedStepper::BeginCapture(Optimizer& optimizer) {
  const c10::NoGradGuard no_grad;
  FSDP_RETURN_IF_ERROR(Arrange(optimizer));
  const int64_t number = captured_.number + 1;
  captured_ = CapturedStep();
  captured_.number = number;
  captured_.parameters = arranged_;
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    captured_.options.push_back(group.options().clone());
  }
  std::set<int64_t> numbers = {1};
  for (const auto& [parameter, state] : optimizer.state()) {
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
    RateOf(batch, optimizer.param_groups()[batch.group].options());
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
void FusedStepper::EndCapture(Optimizer& optimizer) {
  captured_.is_under_way = false;
  SetSteps(-1, optimizer);
}

absl::Status FusedStepper::CheckUnchanged(const Optimizer& optimizer) const {
  if (captured_.parameters != arranged_ || !IsArranged(optimizer)) {
    return absl::FailedPreconditionError(
        "the optimizer's parameters are not those of the captured step");
  }
  const auto& groups = optimizer.param_groups();
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

absl::Status FusedStepper::PrepareReplay(int64_t capture,
                                         Optimizer& optimizer) {
  const c10::NoGradGuard no_grad;
  if (capture != captured_.number) {
    return absl::FailedPreconditionError(
        "the optimizer's step was captured again since, by another "
        "CapturedStep: one of them at a time can be replayed");
  }
  FSDP_RETURN_IF_ERROR(CheckUnchanged(optimizer));
  for (CapturedState& captured : captured_.states) {
    FSDP_RETURN_IF_ERROR(TakeUpCaptured(captured, optimizer.state()));
  }
  // Parameters that had the same number at the capture share its tensor.
  std::map<const void*, int64_t> filled;
  for (const CapturedState& captured : captured_.states) {
    const auto [entry, is_new] =
        filled.emplace(captured.step.unsafeGetTensorImpl(), captured.number);
    if (is_new) captured.step.fill_(captured.number);
    if (entry->second == captured.number) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "parameters that were stepped together when the step was captured come "
        "to steps ",
        entry->second, " and ", captured.number));
  }
  for (Batch& batch : batches_)
    RateOf(batch, optimizer.param_groups()[batch.group].options());
  return absl::OkStatus();
}

void FusedStepper::CountReplay(Optimizer& optimizer) { SetSteps(0, optimizer); }

void FusedStepper::SetSteps(int64_t offset, Optimizer& optimizer) const {
  for (const CapturedState& captured : captured_.states) {
    const auto found = optimizer.state().find(captured.parameter);
    if (found == optimizer.state().end()) continue;
    rule_->SetStep(*found->second, captured.number + offset);
  }
}

}  // namespace fsdp
