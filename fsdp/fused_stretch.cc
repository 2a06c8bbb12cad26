#include "fsdp/fused_stretch.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
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
#include "fsdp/fused_rule.h"
#include "fsdp/fused_runs.h"
#include "fsdp/offload_space.h"
#include "fsdp/resting_memory.h"

namespace fsdp {
namespace {

using torch::optim::OptimizerParamState;

// Of slots that do not follow each other.
constexpr int64_t kSlotAlignmentBytes = 64;

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

// `gradient` with its elements in memory as those of `parameter`.
at::Tensor InOrderOf(const at::Tensor& parameter, const at::Tensor& gradient) {
  if (gradient.strides() == parameter.strides() ||
      (gradient.is_contiguous() && parameter.is_contiguous())) {
    return gradient;
  }
  return at::empty_like(parameter).copy_(gradient);
}

// Where each of `parameters` begins in one tensor for all of them, in which
// those that follow each other do so, too; last, the size of that.
std::vector<int64_t> PlacesFor(const std::vector<at::Tensor>& parameters) {
  const int64_t alignment =
      kSlotAlignmentBytes /
      static_cast<int64_t>(parameters.front().element_size());
  std::vector<int64_t> begins;
  int64_t used = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (i > 0 && !FollowsInMemory(parameters[i - 1], parameters[i])) {
      used = (used + alignment - 1) / alignment * alignment;
    }
    begins.push_back(used);
    used += parameters[i].numel();
  }
  begins.push_back(used);
  return begins;
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

FusedStretch::FusedStretch(
    size_t group, std::vector<std::pair<size_t, at::Tensor>> parameters)
    : group_(group) {
  // Empty ones before what begins at the same place.
  const auto is_before = [](const auto& a, const auto& b) {
    return std::make_pair(a.second.storage_offset(), a.second.numel()) <
           std::make_pair(b.second.storage_offset(), b.second.numel());
  };
  std::stable_sort(parameters.begin(), parameters.end(), is_before);
  for (auto& [place, parameter] : parameters) {
    slices_.emplace_back().parameter = std::move(parameter);
    members_.emplace_back().place = place;
  }
  RestingMemory* const memory = RestingMemory::Of(slices_.front().parameter);
  if (memory != nullptr && memory->space() != nullptr) {
    shard_ = memory->shared_from_this();
  }
}

bool FusedStretch::RestsElsewhere() const {
  if (shard_ == nullptr) return false;
  return !shard_->stays() ||
         shard_->space()->OptimizerRestsElsewhere(*shard_) ||
         std::any_of(slices_.begin(), slices_.end(),
                     [](const FusedSlice& slice) {
                       return fsdp::RestsElsewhere(slice.parameter.grad());
                     });
}

void FusedStretch::Prefetch() const {
  if (shard_ == nullptr) return;
  shard_->Prefetch();
  for (const auto& [what, memory] : memory_) memory->Prefetch();
  for (const FusedSlice& slice : slices_) {
    PrefetchTensor(slice.parameter.grad());
  }
}

absl::Status FusedStretch::BringIn() {
  if (shard_ == nullptr) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(resident_.Add(slices_.front().parameter, Use::kUpdate));
  for (const FusedSlice& slice : slices_) {
    FSDP_RETURN_IF_ERROR(resident_.Add(slice.parameter.grad(), Use::kRead));
    for (const at::Tensor& slot : slice.slots) {
      FSDP_RETURN_IF_ERROR(resident_.Add(slot, Use::kUpdate));
    }
  }
  return resident_.Add(kept_steps_, Use::kUpdate);
}

// Takes up what an earlier run has kept, but not in place of states that were
// loaded since.
absl::Status FusedStretch::Restore(const FusedRule& rule, int num_slots,
                                   OptimizerStates& states) {
  const auto size = static_cast<int64_t>(slices_.size());
  FSDP_ASSIGN_OR_RETURN(
      const std::shared_ptr<RestingMemory> memory,
      Place("steps", size * static_cast<int64_t>(sizeof(int64_t))));
  if (memory == nullptr) return absl::OkStatus();
  const at::Tensor steps = memory->AsTensor(at::kLong);
  FSDP_RETURN_IF_ERROR(resident_.Add(steps, Use::kUpdate));
  for (int k = 0; k < num_slots; ++k) {
    if (slices_.front().slots[k].defined()) continue;
    FSDP_RETURN_IF_ERROR(AllocateSlot(k));
  }
  kept_steps_ = steps;
  if (shard_->space()->step() == 0) kept_steps_.zero_();
  const int64_t* const kept = steps.const_data_ptr<int64_t>();
  for (size_t i = 0; i < slices_.size(); ++i) {
    void* const parameter = slices_[i].parameter.unsafeGetTensorImpl();
    if (kept[i] == 0 || states.count(parameter) > 0) continue;
    std::unique_ptr<OptimizerParamState> state = rule.NewState();
    rule.SetStep(*state, kept[i]);
    const FusedRule::Slots slots = rule.SlotsOf(*state);
    for (int k = 0; k < num_slots; ++k) {
      members_[i].used[k] = true;
      *slots[k] = slices_[i].slots[k];
    }
    states[parameter] = std::move(state);
  }
  return absl::OkStatus();
}

bool FusedStretch::keeps() const {
  return shard_ != nullptr && shard_->space()->keeps();
}

// What an attempt that has failed has placed is found again.
absl::StatusOr<std::shared_ptr<RestingMemory>> FusedStretch::Place(
    const std::string& what, int64_t bytes) {
  const auto found = memory_.find(what);
  if (found != memory_.end()) return found->second;
  FSDP_ASSIGN_OR_RETURN(
      std::shared_ptr<RestingMemory> memory,
      shard_->space()->PlaceOptimizerState(
          *shard_, absl::StrCat(what, " of group ", group_), bytes));
  if (memory != nullptr) memory_[what] = memory;
  return memory;
}

bool FusedStretch::HasGradient() const {
  return std::any_of(
      slices_.begin(), slices_.end(),
      [](const FusedSlice& slice) { return slice.parameter.grad().defined(); });
}

absl::Status FusedStretch::Check(const FusedRule& rule, int num_slots,
                                 const OptimizerStates& states) const {
  for (size_t i = 0; i < slices_.size(); ++i) {
    if (!slices_[i].parameter.grad().defined()) continue;
    const absl::Status status = CheckMember(i, rule, num_slots, states);
    if (!status.ok()) {
      return Annotate(status,
                      absl::StrCat("stepping parameter ", members_[i].place,
                                   " of group ", group_));
    }
  }
  return absl::OkStatus();
}

absl::Status FusedStretch::CheckMember(size_t i, const FusedRule& rule,
                                       int num_slots,
                                       const OptimizerStates& states) const {
  const at::Tensor& parameter = slices_[i].parameter;
  FSDP_RETURN_IF_ERROR(CheckGradient(parameter, parameter.grad()));
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
    // Everything anew: an earlier step may have run out of memory.
    FusedSlice& slice = slices_[i];
    const at::Tensor& gradient = slice.parameter.grad();
    slice.gradient = gradient.defined() ? InOrderOf(slice.parameter, gradient)
                                        : at::Tensor();
    slice.step = 1;
    members_[i].state = nullptr;
    members_[i].state_is_new = false;
  }
  for (size_t i = 0; i < slices_.size() && num_slots > 0; ++i) {
    FusedSlice& slice = slices_[i];
    if (!slice.gradient.defined()) continue;
    std::unique_ptr<OptimizerParamState>& state =
        states[slice.parameter.unsafeGetTensorImpl()];
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

// Takes the values of `held`, a state's tensor, which becomes the slot in
// Count(): until then an undefined one tells that the first step is still to
// come.
absl::Status FusedStretch::TakeSlot(size_t i, int k, const at::Tensor& held) {
  at::Tensor& own = slices_[i].slots[k];
  bool& used = members_[i].used[k];
  if (!own.defined()) FSDP_RETURN_IF_ERROR(AllocateSlot(k));
  if (held.is_same(own)) return absl::OkStatus();
  if (held.defined()) {
    own.copy_(held);
  } else if (used) {
    own.zero_();
  }
  used = true;
  return absl::OkStatus();
}

// For parameters that may get a gradient later, too.
absl::Status FusedStretch::AllocateSlot(int k) {
  std::vector<size_t> members;
  std::vector<at::Tensor> parameters;
  for (size_t i = 0; i < slices_.size(); ++i) {
    const FusedSlice& slice = slices_[i];
    if (slice.slots[k].defined()) continue;
    // In kept files everything has the same place whatever is trainable.
    if (!keeps() && !slice.parameter.grad().defined() &&
        !slice.parameter.requires_grad()) {
      continue;
    }
    members.push_back(i);
    parameters.push_back(slice.parameter);
  }
  const std::vector<int64_t> begins = PlacesFor(parameters);
  // Not views to autograd, so that they may be detached or replaced.
  const at::AutoDispatchBelowADInplaceOrView untracked;
  FSDP_ASSIGN_OR_RETURN(
      const at::Tensor all,
      Zeros(begins.back(), absl::StrCat("slot ", k, " from parameter ",
                                        members_[members.front()].place)));
  for (size_t j = 0; j < members.size(); ++j) {
    slices_[members[j]].slots[k] = all.as_strided(
        parameters[j].sizes(), parameters[j].strides(), begins[j]);
  }
  return absl::OkStatus();
}

absl::StatusOr<at::Tensor> FusedStretch::Zeros(int64_t numel,
                                               const std::string& what) {
  const at::TensorOptions options = slices_.front().parameter.options();
  if (shard_ != nullptr) {
    FSDP_ASSIGN_OR_RETURN(
        const std::shared_ptr<RestingMemory> memory,
        Place(what, numel * static_cast<int64_t>(options.dtype().itemsize())));
    if (memory != nullptr) {
      const at::Tensor all =
          memory->AsTensor(c10::typeMetaToScalarType(options.dtype()));
      FSDP_RETURN_IF_ERROR(resident_.Add(all, Use::kUpdate));
      return all;
    }
  }
  return at::zeros({numel}, options);
}

void FusedStretch::Finish() {
  runs_.End();
  if (kept_steps_.defined()) {
    int64_t* const steps = kept_steps_.mutable_data_ptr<int64_t>();
    for (size_t i = 0; i < slices_.size(); ++i) {
      if (members_[i].state != nullptr) steps[i] = slices_[i].step;
    }
  }
  LetGo();
}

absl::Status FusedStretch::Reserve(int num_slots) {
  for (int k = 0; k < num_slots; ++k) {
    const bool missing =
        std::any_of(slices_.begin(), slices_.end(), [k](const FusedSlice& s) {
          return s.parameter.grad().defined() && !s.slots[k].defined();
        });
    if (missing) FSDP_RETURN_IF_ERROR(AllocateSlot(k));
  }
  return absl::OkStatus();
}

void FusedStretch::Undo(OptimizerStates& states) {
  for (size_t i = 0; i < slices_.size(); ++i) {
    Member& member = members_[i];
    if (member.state_is_new) {
      states.erase(slices_[i].parameter.unsafeGetTensorImpl());
    }
    member.state_is_new = false;
    member.state = nullptr;
  }
}

absl::Status FusedStretch::Evacuate(const FusedRule& rule,
                                    OptimizerStates& states) {
  if (memory_.empty()) return absl::OkStatus();
  for (const FusedSlice& slice : slices_) {
    const auto found = states.find(slice.parameter.unsafeGetTensorImpl());
    if (found == states.end()) continue;
    for (at::Tensor* slot : rule.SlotsOf(*found->second)) {
      if (slot == nullptr || !fsdp::RestsElsewhere(*slot)) continue;
      FSDP_ASSIGN_OR_RETURN(const Resident resident,
                            Resident::Of(*slot, Use::kRead));
      *slot = slot->clone();
    }
  }
  return absl::OkStatus();
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
