#include "fsdp/model/order_check.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "comm/agreement.h"

namespace fsdp {
namespace {

constexpr char kLabel[] = "the collectives of an iteration";

}  // namespace

absl::Status OrderCheck::Compare(OrderLog order) {
  auto comparison = std::make_unique<Comparison>();
  comparison->order = std::move(order);
  // The maxima over the ranks are the greatest hash and the complement of the
  // least.
  const int64_t bits = static_cast<int64_t>(comparison->order.hash());
  comparison->extremes = at::tensor({bits, ~bits}, at::kLong);
  FSDP_ASSIGN_OR_RETURN(comparison->work,
                        communicator_.AllReduce(comparison->extremes,
                                                comm::ReduceOp::kMax, kLabel));
  if (lags_) std::swap(comparison, under_way_);
  return comparison == nullptr ? absl::OkStatus() : Finish(*comparison);
}

absl::Status OrderCheck::Finish() {
  if (under_way_ == nullptr) return absl::OkStatus();
  const auto comparison = std::exchange(under_way_, nullptr);
  return Finish(*comparison);
}

absl::Status OrderCheck::Finish(Comparison& comparison) {
  const absl::Time deadline = absl::Now() + timeout_;
  FSDP_RETURN_IF_ERROR(comparison.work->Wait(deadline));
  const int64_t* extreme = comparison.extremes.const_data_ptr<int64_t>();
  if (extreme[0] == ~extreme[1]) return absl::OkStatus();
  return comm::CheckSame(communicator_, comparison.order.ToString(), kLabel,
                         deadline);
}

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
