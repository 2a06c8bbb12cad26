#include "fsdp/optim/fused_stretch.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/optim/fused_runs.h"
#include "fsdp/resting/offload_space.h"

namespace fsdp {
namespace {

using torch::optim::OptimizerParamState;

absl::Status CheckGradient(const at::Tensor& parameter,
                           const at::Tensor& gradient) {
  if (gradient.layout() != at::kStrided) {
    return absl::InvalidArgumentError(
        "its gradient is sparse: make it dense, or use an optimizer of "
        "torch::optim that takes sparse ones");
  }
  if (gradient.sizes() == parameter.sizes() &&
      gradient.device() == parameter.device() &&
      at::isFloatingType(gradient.scalar_type())) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "its gradient has sizes [", absl::StrJoin(gradient.sizes(), ", "),
      "], dtype ", c10::toString(gradient.scalar_type()), ", on ",
      gradient.device().str(), ", and it has sizes [",
      absl::StrJoin(parameter.sizes(), ", "), "], on ",
      parameter.device().str(),
      ": they must be equal, and the dtype a floating-point one"));
}

// Returns the gradient on the host, which waits for a copy from a device.
at::Tensor GradientOnHost(const at::Tensor& gradient) {
  return fsdp::RestsElsewhere(gradient) ? OnHost(gradient) : gradient.cpu();
}

// Returns `gradient` with its elements in memory in the order of `parameter`.
at::Tensor InOrderOf(const at::Tensor& parameter, const at::Tensor& gradient) {
  if (gradient.strides() == parameter.strides() ||
      (gradient.is_contiguous() && parameter.is_contiguous())) {
    return gradient;
  }
  return at::empty_like(parameter).copy_(gradient);
}

}  // namespace

absl::Status CheckFusedParameter(const at::Tensor& parameter) {
  if (parameter.layout() != at::kStrided || !parameter.has_storage() ||
      !parameter.is_non_overlapping_and_dense()) {
    return absl::InvalidArgumentError(
        "it is sparse, or its elements have gaps in memory or share it: use "
        "torch::optim for it, or make it contiguous");
  }
  const at::ScalarType dtype = parameter.scalar_type();
  if (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
      dtype == at::kBFloat16) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "it has dtype ", c10::toString(dtype),
      ", and torch's fused kernels know float, double, half and bfloat16: use "
      "torch::optim for it"));
}

c10::Device SteppingDevice(const at::Tensor& parameter) {
  const RestingMemory* const memory = RestingMemory::Of(parameter);
  const bool on_host = memory != nullptr && memory->space() != nullptr &&
                       memory->space()->StepsOnHost(*memory);
  return on_host ? c10::Device(at::kCPU) : parameter.device();
}

FusedStretch::FusedStretch(
    size_t group, std::vector<std::pair<size_t, at::Tensor>> parameters)
    : group_(group) {
  // Empty parameters precede the one that begins at the same place.
  const auto is_before = [](const auto& a, const auto& b) {
    return std::make_pair(a.second.storage_offset(), a.second.numel()) <
           std::make_pair(b.second.storage_offset(), b.second.numel());
  };
  std::stable_sort(parameters.begin(), parameters.end(), is_before);
  for (auto& [place, parameter] : parameters) {
    members_.push_back({place, std::move(parameter)});
  }
  const at::Tensor& first = members_.front().parameter;
  RestingMemory* const memory = RestingMemory::Of(first);
  if (memory != nullptr && memory->space() != nullptr) {
    shard_ = memory->shared_from_this();
  }
  on_host_ = SteppingDevice(first) != first.device();
  for (const Member& member : members_) {
    slices_.emplace_back().parameter =
        on_host_ ? OnHost(member.parameter) : member.parameter;
  }
}

bool FusedStretch::RestsElsewhere() const {
  if (shard_ == nullptr) return false;
  return !shard_->stays() ||
         shard_->space()->OptimizerRestsElsewhere(*shard_) ||
         std::any_of(members_.begin(), members_.end(),
                     [](const Member& member) {
                       return fsdp::RestsElsewhere(member.parameter.grad());
                     });
}

void FusedStretch::Prefetch() const {
  if (shard_ == nullptr) return;
  shard_->Prefetch();
  for (const auto& [what, memory] : memory_) memory->Prefetch();
  for (const Member& member : members_) PrefetchTensor(member.parameter.grad());
}

absl::Status FusedStretch::BringIn() {
  if (shard_ == nullptr) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(
      resident_.Add(members_.front().parameter, Use::kUpdate, where()));
  for (const Member& member : members_) {
    FSDP_RETURN_IF_ERROR(
        resident_.Add(member.parameter.grad(), Use::kRead, where()));
  }
  return BringInStates();
}

bool FusedStretch::HasGradient() const {
  return std::any_of(
      members_.begin(), members_.end(),
      [](const Member& member) { return member.parameter.grad().defined(); });
}

absl::Status FusedStretch::Check(const FusedRule& rule, int num_slots,
                                 const OptimizerStates& states) const {
  // While something else has memory in use, a step's writes would not reach its
  // tier.
  const auto in_use = [](const auto& memory) {
    return memory.second->in_use();
  };
  if ((shard_ != nullptr && shard_->in_use()) ||
      std::any_of(memory_.begin(), memory_.end(), in_use)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "stepping parameter ", members_.front().place, " of group ", group_,
        ": it or its state is offloaded, and an fsdp::Resident has it in "
        "memory: let that go before step()"));
  }
  for (size_t i = 0; i < slices_.size(); ++i) {
    if (!members_[i].parameter.grad().defined()) continue;
    absl::Status status =
        CheckGradient(members_[i].parameter, members_[i].parameter.grad());
    if (status.ok()) status = CheckState(i, rule, num_slots, states);
    if (!status.ok()) {
      return Annotate(status,
                      absl::StrCat("stepping parameter ", members_[i].place,
                                   " of group ", group_));
    }
  }
  return absl::OkStatus();
}

absl::Status FusedStretch::CheckState(size_t i, const FusedRule& rule,
                                      int num_slots,
                                      const OptimizerStates& states) const {
  const at::Tensor& parameter = members_[i].parameter;
  const auto found = states.find(parameter.unsafeGetTensorImpl());
  if (found == states.end()) return absl::OkStatus();
  const FusedRule::Slots slots = rule.SlotsOf(*found->second);
  for (int k = 0; k < num_slots; ++k) {
    const at::Tensor& held = *slots[k];
    if (!held.defined() || held.sizes() == parameter.sizes()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("its state has sizes [", absl::StrJoin(held.sizes(), ", "),
                     "], and it has [", absl::StrJoin(parameter.sizes(), ", "),
                     "]: load a state of this model on as many ranks"));
  }
  return absl::OkStatus();
}

absl::Status FusedStretch::Begin(const FusedRule& rule, int num_slots,
                                 OptimizerStates& states) {
  num_slots_ = num_slots;
  FSDP_RETURN_IF_ERROR(BringIn());
  if (keeps() && num_slots > 0 && !kept_steps_.defined()) {
    FSDP_RETURN_IF_ERROR(Restore(rule, num_slots, states));
  }
  for (size_t i = 0; i < slices_.size(); ++i) {
    // An earlier step may have run out of memory and left gradients here.
    FusedSlice& slice = slices_[i];
    const at::Tensor& gradient = members_[i].parameter.grad();
    slice.gradient = at::Tensor();
    if (gradient.defined()) {
      slice.gradient = InOrderOf(
          slice.parameter, on_host_ ? GradientOnHost(gradient) : gradient);
    }
    slice.step = 1;
    members_[i].state = nullptr;
    members_[i].state_is_new = false;
  }
  for (size_t i = 0; i < slices_.size() && num_slots > 0; ++i) {
    FusedSlice& slice = slices_[i];
    if (!slice.gradient.defined()) continue;
    std::unique_ptr<OptimizerParamState>& state =
        states[members_[i].parameter.unsafeGetTensorImpl()];
    if (state == nullptr) {
      state = rule.NewState();
      members_[i].state_is_new = true;
    }
    slice.step = rule.NextStep(*state);
    members_[i].state = state.get();
    const FusedRule::Slots slots = rule.SlotsOf(*state);
    for (int k = 0; k < num_slots; ++k) {
      FSDP_RETURN_IF_ERROR(TakeSlot(i, k, *slots[k]));
    }
  }
  const at::Tensor& any = slices_.front().parameter;
  const at::ScalarType dtype = any.scalar_type();
  runs_.Begin(slices_, num_slots,
              rule.KernelDtype(dtype, any.device()) != dtype);
  return absl::OkStatus();
}

std::vector<const FusedSlice*> FusedStretch::counted() const {
  std::vector<const FusedSlice*> counted;
  for (size_t i = 0; i < slices_.size(); ++i) {
    if (members_[i].state != nullptr) counted.push_back(&slices_[i]);
  }
  return counted;
}

void FusedStretch::Finish() {
  runs_.End();
  // Counts the write as every in-place operator does; kernels over several
  // parameters in one piece do not.
  for (size_t i = 0; i < slices_.size(); ++i) {
    if (!slices_[i].gradient.defined()) continue;
    members_[i].parameter.unsafeGetTensorImpl()->bump_version();
  }
  if (kept_steps_.defined()) {
    int64_t* const steps = kept_steps_.mutable_data_ptr<int64_t>();
    for (size_t i = 0; i < slices_.size(); ++i) {
      if (members_[i].state != nullptr) steps[i] = slices_[i].step;
    }
  }
  LetGo();
}

void FusedStretch::Undo(OptimizerStates& states) {
  for (size_t i = 0; i < slices_.size(); ++i) {
    Member& member = members_[i];
    if (member.state_is_new) {
      states.erase(member.parameter.unsafeGetTensorImpl());
    }
    member.state_is_new = false;
    member.state = nullptr;
  }
}

void FusedStretch::LetGo() {
  for (FusedSlice& slice : slices_) slice.gradient.reset();
  resident_ = Resident();
}

void FusedStretch::Count(const FusedRule& rule) {
  for (size_t i = 0; i < slices_.size(); ++i) {
    OptimizerParamState* const state = members_[i].state;
    members_[i].state_is_new = false;
    members_[i].state = nullptr;
    if (state == nullptr) continue;
    rule.SetStep(*state, slices_[i].step);
    const FusedRule::Slots slots = rule.SlotsOf(*state);
    for (int k = 0; k < num_slots_; ++k) {
      if (!slots[k]->is_same(slices_[i].slots[k])) {
        *slots[k] = slices_[i].slots[k];
      }
    }
  }
}

}  // namespace fsdp
