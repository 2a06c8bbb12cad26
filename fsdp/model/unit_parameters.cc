#include "fsdp/model/unit_parameters.h"

#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/variable.h>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace fsdp {
namespace {

using ::torch::autograd::AutogradMeta;

// Overrides gradients alone; LibTorch reads everything else from the base's
// members.
class OwnedMeta final : public AutogradMeta {
 public:
  OwnedMeta(AutogradMeta* before, std::string name,
            std::shared_ptr<const ParameterOwner> owner)
      : parameter_(std::move(name)), owner_(std::move(owner)) {
    if (before == nullptr) return;
    name_ = std::move(before->name_);
    grad_ = std::move(before->grad_);
    grad_fn_ = std::move(before->grad_fn_);
    grad_accumulator_ = std::move(before->grad_accumulator_);
    fw_grad_ = std::move(before->fw_grad_);
    hooks_ = std::move(before->hooks_);
    cpp_hooks_list_ = std::move(before->cpp_hooks_list_);
    post_acc_grad_hooks_ = std::move(before->post_acc_grad_hooks_);
    requires_grad_ = before->requires_grad_;
    retains_grad_ = before->retains_grad_;
    output_nr_ = before->output_nr_;
    grad_dtype_ = before->grad_dtype_;
    allow_grad_dtype_mismatch_ = before->allow_grad_dtype_mismatch_;
    // Leaves out is_view_: the tensor's memory is the model's, of which it is
    // no view.
  }

  const at::Tensor& grad() const override {
    CheckMayBeUsed();
    return AutogradMeta::grad();
  }
  at::Tensor& mutable_grad() override {
    CheckMayBeUsed();
    return AutogradMeta::mutable_grad();
  }

  const ParameterOwner& owner() const { return *owner_; }

 private:
  void CheckMayBeUsed() const {
    if (!requires_grad() || owner_->gradients_are_open()) return;
    throw StatusError(absl::FailedPreconditionError(absl::StrCat(
        "the gradient of the module's own parameter ", parameter_,
        " is asked for, which has none: this rank's part of it is at its "
        "shard. Clip by ClipGradNorm(), drop gradients by zero_grad() of the "
        "sharded module or of the optimizer, and read them from Parameters() "
        "or Ranges(), or inside SummonFullParams() with with_grads")));
  }

  const std::string parameter_;
  const std::shared_ptr<const ParameterOwner> owner_;
};

}  // namespace

bool UnitParameters::Slot::AnyTrainable() const {
  return absl::c_any_of(tensors,
                        [](const at::Tensor& t) { return t.requires_grad(); });
}

void UnitParameters::Add(std::string name, std::vector<at::Tensor> tensors,
                         const at::Tensor& shard) {
  auto sentinel = MakeSentinel(tensors.front(), name);
  slots_.push_back(
      {std::move(name), std::move(tensors), shard, std::move(sentinel)});
}

bool UnitParameters::AnyTrainable() const {
  return absl::c_any_of(slots_,
                        [](const Slot& slot) { return slot.AnyTrainable(); });
}

void UnitParameters::AttachSentinels() {
  for (const Slot& slot : slots_) {
    slot.shard.set_requires_grad(slot.AnyTrainable());
  }
  RestoreSentinels();
}

void UnitParameters::RestoreSentinels() const {
  for (const Slot& slot : slots_) {
    if (!slot.shard.requires_grad()) continue;
    for (const at::Tensor& tensor : slot.tensors) {
      if (tensor.requires_grad()) AttachSentinel(tensor, slot.sentinel);
    }
  }
}

void UnitParameters::ClearEdges() const {
  for (const Slot& slot : slots_) {
    for (const at::Tensor& tensor : slot.tensors) ClearEdge(tensor);
  }
}

ParameterSlots UnitParameters::TakeTrainable() {
  ParameterSlots trainable(slots_.size());
  ClearEdges();
  for (size_t k = 0; k < slots_.size(); ++k) {
    for (const at::Tensor& tensor : slots_[k].tensors) {
      if (tensor.requires_grad()) trainable[k].push_back(tensor);
    }
    const bool requires_grad = !trainable[k].empty();
    if (slots_[k].shard.requires_grad() != requires_grad) {
      slots_[k].shard.set_requires_grad(requires_grad);
    }
  }
  return trainable;
}

absl::Status UnitParameters::SetTrainable(size_t slot, bool trainable) {
  const Slot& of = slots_[slot];
  if (trainable && !of.shard.is_floating_point()) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter ", of.name, " has dtype ",
                     c10::toString(of.shard.scalar_type()),
                     ": bytes have no gradient, and stay frozen"));
  }
  for (const at::Tensor& tensor : of.tensors) {
    ClearEdge(tensor);
    tensor.set_requires_grad(trainable);
    if (trainable) AttachSentinel(tensor, of.sentinel);
  }
  of.shard.set_requires_grad(trainable);
  if (!trainable) of.shard.mutable_grad().reset();
  return absl::OkStatus();
}

absl::Status UnitParameters::CheckHooks() const {
  for (const Slot& slot : slots_) {
    if (HasTensorHooks(slot.shard) || HasPostAccumulateHooks(slot.shard)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "a hook on the shard of ", slot.name,
          " in Parameters() would not run: register it on the module's "
          "parameter, where it gets the whole gradient of this rank, or use "
          "StepInBackward()"));
    }
    for (const at::Tensor& tensor : slot.tensors) {
      if (!HasPostAccumulateHooks(tensor)) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "a post-accumulate-grad hook on parameter ", slot.name,
          " would not run: the gradient of a sharded parameter is in .grad of "
          "its shard. Use StepInBackward()"));
    }
  }
  return absl::OkStatus();
}

uint32_t UnitParameters::Slot::Version() const {
  uint32_t sum = 0;
  for (const at::Tensor& tensor : tensors) sum += tensor._version();
  return sum;
}

void UnitParameters::SeeVersions() {
  for (Slot& slot : slots_) slot.version = slot.Version();
}

bool UnitParameters::NoteWrittenShards() {
  bool any = false;
  for (Slot& slot : slots_) {
    const uint32_t version = slot.shard._version();
    if (version == slot.shard_version) continue;
    slot.shard_version = version;
    const uint32_t before = slot.Version();
    for (const at::Tensor& tensor : slot.tensors) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
    // Other writes to the tensor remain to be found.
    slot.version += slot.Version() - before;
    any = true;
  }
  return any;
}

std::vector<uint32_t> UnitParameters::ShardVersions() const {
  std::vector<uint32_t> versions;
  versions.reserve(slots_.size());
  for (const Slot& slot : slots_) versions.push_back(slot.shard._version());
  return versions;
}

absl::Status UnitParameters::CheckUnwrittenBetweenForwards() const {
  for (const Slot& slot : slots_) {
    if (slot.Version() == slot.version) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "parameter ", slot.name, " of unit ", unit_,
        " was written outside a forward, while the unit was gathered by "
        "Unshard() for example: the change would be lost when it is freed. "
        "Write through Ranges() or SummonFullParams()"));
  }
  return absl::OkStatus();
}

absl::Status UnitParameters::CheckUnwrittenInForward() const {
  for (const Slot& slot : slots_) {
    if (slot.Version() != slot.version) return Modified(slot);
  }
  return absl::OkStatus();
}

absl::Status UnitParameters::Modified(const Slot& slot) const {
  return absl::FailedPreconditionError(absl::StrCat(
      "parameter ", slot.name,
      " was modified in place during the forward of unit ", unit_,
      ": the change would be lost when the unit is freed. Write through "
      "Ranges() between steps, or compute with a copy"));
}

void UnusedParameters::NoteGradients(absl::Span<const TensorRange> shards) {
  if (is_over()) return;
  has_reduced_ = true;
  has_had_gradient_.resize(shards.size());
  for (size_t i = 0; i < shards.size(); ++i) {
    if (shards[i].values.grad().defined()) has_had_gradient_[i] = true;
  }
}

std::vector<std::string> UnusedParameters::NoteEndOfStep(
    absl::Span<const TensorRange> shards) {
  if (!has_reduced_ || absl::c_any_of(shards, [](const TensorRange& named) {
        return named.values.grad().defined();
      })) {
    return {};
  }
  has_reduced_ = false;
  if (++steps_ended_ != kStepsLookedAt) return {};
  std::vector<std::string> names;
  for (size_t i = 0; i < shards.size(); ++i) {
    if (shards[i].values.requires_grad() && !has_had_gradient_[i]) {
      names.push_back(shards[i].name);
    }
  }
  return names;
}

void SetOwner(const at::Tensor& parameter, const std::string& name,
              std::shared_ptr<const ParameterOwner> owner) {
  at::TensorImpl& impl = *parameter.unsafeGetTensorImpl();
  impl.set_autograd_meta(std::make_unique<OwnedMeta>(
      static_cast<AutogradMeta*>(impl.autograd_meta()), name,
      std::move(owner)));
}

const ParameterOwner* OwnerOf(const at::Tensor& parameter) {
  const auto* meta = dynamic_cast<const OwnedMeta*>(
      parameter.unsafeGetTensorImpl()->autograd_meta());
  return meta == nullptr ? nullptr : &meta->owner();
}

}  // namespace fsdp
