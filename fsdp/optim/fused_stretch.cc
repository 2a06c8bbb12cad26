#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/optim/fused_stepper.h"
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

// Returns `gradient` with its elements in memory in the order of `parameter`.
at::Tensor InOrderOf(const at::Tensor& parameter, const at::Tensor& gradient) {
  if (gradient.strides() == parameter.strides() ||
      (gradient.is_contiguous() && parameter.is_contiguous())) {
    return gradient;
  }
  return at::empty_like(parameter).copy_(gradient);
}

// The alignment of slots that do not follow each other.
constexpr int64_t kSlotAlignmentBytes = 64;

// Returns where each of `parameters` begins in one tensor for all of them, and
// at last that tensor's size. What follows in memory follows there too.
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

c10::Device SteppingDevice(const at::Tensor& parameter) {
  const RestingMemory* const memory = RestingMemory::Of(parameter);
  const bool on_host = memory != nullptr && memory->space() != nullptr &&
                       memory->space()->StepsOnHost(*memory);
  return on_host ? c10::Device(at::kCPU) : parameter.device();
}

FusedStretch::FusedStretch(
    const FusedRule& rule, size_t group,
    std::vector<std::pair<size_t, at::Tensor>> parameters)
    : rule_(&rule), group_(group) {
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

bool FusedStretch::HasGradient() const {
  return std::any_of(
      members_.begin(), members_.end(),
      [](const Member& member) { return member.parameter.grad().defined(); });
}

std::vector<std::pair<at::Tensor, at::Tensor>> FusedStretch::TakeGradients(
    const std::set<const void*>& kept) const {
  std::vector<std::pair<at::Tensor, at::Tensor>> taken;
  for (const Member& member : members_) {
    const at::Tensor& parameter = member.parameter;
    if (!parameter.grad().defined() ||
        kept.count(parameter.unsafeGetTensorImpl()) > 0) {
      continue;
    }
    taken.emplace_back(parameter,
                       std::exchange(parameter.mutable_grad(), at::Tensor()));
  }
  return taken;
}

absl::Status FusedStretch::Check(int num_slots,
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
    if (status.ok()) status = CheckState(i, num_slots, states);
    if (!status.ok()) {
      return Annotate(status,
                      absl::StrCat("stepping parameter ", members_[i].place,
                                   " of group ", group_));
    }
  }
  return absl::OkStatus();
}

absl::Status FusedStretch::CheckState(size_t i, int num_slots,
                                      const OptimizerStates& states) const {
  const at::Tensor& parameter = members_[i].parameter;
  const auto found = states.find(parameter.unsafeGetTensorImpl());
  if (found == states.end()) return absl::OkStatus();
  const FusedRule::Slots slots = rule_->SlotsOf(*found->second);
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

absl::Status FusedStretch::Begin(int num_slots, OptimizerStates& states) {
  num_slots_ = num_slots;
  if (shard_ != nullptr) {
    const Where where = on_host_ ? Where::kHost : Where::kDevice;
    FSDP_RETURN_IF_ERROR(
        resident_.Add(members_.front().parameter, Use::kUpdate, where));
    for (const Member& member : members_) {
      FSDP_RETURN_IF_ERROR(
          resident_.Add(member.parameter.grad(), Use::kRead, where));
    }
    FSDP_RETURN_IF_ERROR(BringInStates());
  }
  FSDP_RETURN_IF_ERROR(Restore(num_slots, states));
  for (size_t i = 0; i < slices_.size(); ++i) {
    // An earlier step may have run out of memory and left gradients here.
    FusedSlice& slice = slices_[i];
    at::Tensor gradient = members_[i].parameter.grad();
    slice.gradient = at::Tensor();
    if (gradient.defined()) {
      if (on_host_) {  // copying from a device waits for it
        gradient =
            fsdp::RestsElsewhere(gradient) ? OnHost(gradient) : gradient.cpu();
      }
      slice.gradient = InOrderOf(slice.parameter, gradient);
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
      state = rule_->NewState();
      members_[i].state_is_new = true;
    }
    slice.step = rule_->NextStep(*state);
    members_[i].state = state.get();
    const FusedRule::Slots slots = rule_->SlotsOf(*state);
    for (int k = 0; k < num_slots; ++k) {
      FSDP_RETURN_IF_ERROR(TakeSlot(i, k, *slots[k]));
    }
  }
  const at::Tensor& any = slices_.front().parameter;
  const at::ScalarType dtype = any.scalar_type();
  runs_.Begin(slices_, num_slots,
              rule_->KernelDtype(dtype, any.device()) != dtype);
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

void FusedStretch::Count() {
  for (size_t i = 0; i < slices_.size(); ++i) {
    OptimizerParamState* const state = members_[i].state;
    members_[i].state_is_new = false;
    members_[i].state = nullptr;
    if (state == nullptr) continue;
    rule_->SetStep(*state, slices_[i].step);
    const FusedRule::Slots slots = rule_->SlotsOf(*state);
    for (int k = 0; k < num_slots_; ++k) {
      if (!slots[k]->is_same(slices_[i].slots[k])) {
        *slots[k] = slices_[i].slots[k];
      }
    }
  }
}

// Kept files have slots for all parameters: places must not depend on which of
// them are trainable.
bool FusedStretch::HasSlots(size_t i) const {
  const at::Tensor& parameter = members_[i].parameter;
  return keeps() || parameter.grad().defined() || parameter.requires_grad();
}

bool FusedStretch::keeps() const {
  return shard_ != nullptr && shard_->space()->keeps();
}

absl::Status FusedStretch::BringInStates() {
  for (const FusedSlice& slice : slices_) {
    for (const at::Tensor& slot : slice.slots) {
      FSDP_RETURN_IF_ERROR(resident_.Add(slot, Use::kUpdate));
    }
  }
  return resident_.Add(kept_steps_, Use::kUpdate);
}

// Returns the memory that a failed attempt has placed, if there is some.
absl::StatusOr<std::shared_ptr<RestingMemory>> FusedStretch::Place(
    const std::string& what, int64_t bytes, c10::Device device) {
  const auto found = memory_.find(what);
  if (found != memory_.end()) return found->second;
  FSDP_ASSIGN_OR_RETURN(
      std::shared_ptr<RestingMemory> memory,
      shard_->space()->PlaceOptimizerState(*shard_, what, bytes, device));
  if (memory != nullptr) memory_[what] = memory;
  return memory;
}

absl::StatusOr<at::Tensor> FusedStretch::Zeros(int64_t numel,
                                               const std::string& what) {
  const at::TensorOptions options = slices_.front().parameter.options();
  if (shard_ != nullptr) {
    FSDP_ASSIGN_OR_RETURN(
        const std::shared_ptr<RestingMemory> memory,
        Place(what, numel * static_cast<int64_t>(options.dtype().itemsize()),
              options.device()));
    if (memory != nullptr) {
      at::Tensor all =
          memory->AsTensor(c10::typeMetaToScalarType(options.dtype()));
      FSDP_RETURN_IF_ERROR(resident_.Add(all, Use::kUpdate));
      return all;
    }
  }
  return at::zeros({numel}, options);
}

// Allocates for parameters that may get a gradient later, too.
absl::Status FusedStretch::AllocateSlot(int k) {
  std::vector<size_t> members;
  std::vector<at::Tensor> parameters;
  for (size_t i = 0; i < slices_.size(); ++i) {
    const FusedSlice& slice = slices_[i];
    if (slice.slots[k].defined() || !HasSlots(i)) continue;
    members.push_back(i);
    parameters.push_back(slice.parameter);
  }
  const std::vector<int64_t> begins = PlacesFor(parameters);
  // An empty parameter may begin where another optimizer's parameter begins.
  const auto any = std::find_if(
      members.begin(), members.end(),
      [this](size_t i) { return slices_[i].parameter.numel() > 0; });
  const Member& named =
      members_[keeps() || any == members.end() ? members.front() : *any];
  // Kept files belong to one optimizer and are found again by a parameter's
  // place in its group. Otherwise several optimizers may share a shard.
  const std::string place =
      keeps() ? absl::StrCat("parameter ", named.place, " of group ", group_)
              : absl::StrCat("element ", named.parameter.storage_offset());
  // Autograd must not see views, so that slots can be detached or replaced.
  const at::AutoDispatchBelowADInplaceOrView untracked;
  FSDP_ASSIGN_OR_RETURN(
      const at::Tensor all,
      Zeros(begins.back(), absl::StrCat("slot ", k, " from ", place)));
  for (size_t j = 0; j < members.size(); ++j) {
    slices_[members[j]].slots[k] = all.as_strided(
        parameters[j].sizes(), parameters[j].strides(), begins[j]);
  }
  return absl::OkStatus();
}

absl::Status FusedStretch::Reserve(int num_slots) {
  for (int k = 0; k < num_slots; ++k) {
    bool missing = false;
    for (size_t i = 0; i < slices_.size(); ++i) {
      missing |= members_[i].parameter.grad().defined() &&
                 !slices_[i].slots[k].defined();
    }
    if (missing) FSDP_RETURN_IF_ERROR(AllocateSlot(k));
  }
  return absl::OkStatus();
}

// Copies the values of `held`, a state's tensor, into the slot. Only Count()
// puts the slot into the state: until then, an undefined tensor there says that
// the first step is still to come.
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

// Takes up what an earlier run has kept, once, except for states that were
// loaded since.
absl::Status FusedStretch::Restore(int num_slots, OptimizerStates& states) {
  if (!keeps() || num_slots == 0 || kept_steps_.defined()) {
    return absl::OkStatus();
  }
  const auto size = static_cast<int64_t>(slices_.size());
  FSDP_ASSIGN_OR_RETURN(
      const std::shared_ptr<RestingMemory> memory,
      Place(absl::StrCat("steps of group ", group_),
            size * static_cast<int64_t>(sizeof(int64_t)), at::kCPU));
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
    void* const parameter = members_[i].parameter.unsafeGetTensorImpl();
    if (kept[i] == 0 || states.count(parameter) > 0) continue;
    std::unique_ptr<OptimizerParamState> state = rule_->NewState();
    rule_->SetStep(*state, kept[i]);
    const FusedRule::Slots slots = rule_->SlotsOf(*state);
    for (int k = 0; k < num_slots; ++k) {
      members_[i].used[k] = true;
      *slots[k] = slices_[i].slots[k];
    }
    states[parameter] = std::move(state);
  }
  return absl::OkStatus();
}

absl::Status FusedStretch::TakeUp(int num_slots, OptimizerStates& states) {
  if (shard_ == nullptr || num_slots == 0 ||
      !shard_->space()->OptimizerRestsElsewhere(*shard_)) {
    return absl::OkStatus();
  }
  absl::Status status =
      TorchToStatus("taking up optimizer states", [&]() -> absl::Status {
        FSDP_RETURN_IF_ERROR(BringInStates());
        FSDP_RETURN_IF_ERROR(Restore(num_slots, states));
        for (size_t i = 0; i < slices_.size(); ++i) {
          FusedSlice& slice = slices_[i];
          const auto found =
              states.find(members_[i].parameter.unsafeGetTensorImpl());
          const bool is_ours = found != states.end() && HasSlots(i);
          if (is_ours) {
            FSDP_RETURN_IF_ERROR(CheckState(i, num_slots, states));
            const FusedRule::Slots slots = rule_->SlotsOf(*found->second);
            for (int k = 0; k < num_slots; ++k) {
              if (!slots[k]->defined()) continue;
              FSDP_RETURN_IF_ERROR(TakeSlot(i, k, *slots[k]));
              if (!slots[k]->is_same(slice.slots[k]))
                *slots[k] = slice.slots[k];
            }
          }
          if (kept_steps_.defined()) {
            kept_steps_.mutable_data_ptr<int64_t>()[i] =
                is_ours ? rule_->NextStep(*found->second) - 1 : 0;
          }
        }
        return absl::OkStatus();
      });
  LetGo();
  return status;
}

absl::Status FusedStretch::Evacuate(OptimizerStates& states) {
  if (memory_.empty()) return absl::OkStatus();
  for (const Member& member : members_) {
    const auto found = states.find(member.parameter.unsafeGetTensorImpl());
    if (found == states.end()) continue;
    for (at::Tensor* slot : rule_->SlotsOf(*found->second)) {
      if (slot == nullptr || !fsdp::RestsElsewhere(*slot)) continue;
      FSDP_ASSIGN_OR_RETURN(const Resident resident,
                            Resident::Of(*slot, Use::kRead));
      *slot = slot->clone();
    }
  }
  return absl::OkStatus();
}

}  // namespace fsdp
