#include "fsdp/recompute/checkpoint_arguments.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace fsdp::checkpoint_internal {

TensorVersion::TensorVersion(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_inference()) return;
  counter_ = tensor.unsafeGetTensorImpl()->version_counter();
  version_ = Now();
}

RegionArguments::RegionArguments(const std::vector<at::Tensor*>& tensors,
                                 ActivationOffload* offload,
                                 std::string region_name)
    : region_name_(std::move(region_name)) {
  std::vector<bool> stays;
  for (at::Tensor* tensor : tensors) {
    // A leaf stays in memory anyway: whoever wants its gradient holds it.
    stays.push_back(tensor->defined() && tensor->is_leaf() &&
                    tensor->requires_grad());
    versions_.emplace_back(*tensor);
    tensors_.push_back(tensor->defined() ? tensor->detach() : at::Tensor());
    tensor->reset();
  }
  if (offload == nullptr) return;
  at::Tensor none;
  std::vector<at::Tensor*> may_move;
  may_move.reserve(tensors_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    may_move.push_back(stays[i] ? &none : &tensors_[i]);
  }
  moved_ = offload->MoveOut(may_move, region_name_);
}

absl::Status RegionArguments::CheckUnmodified() const {
  for (size_t i = 0; i < versions_.size(); ++i) {
    if (versions_[i].IsCurrent()) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "tensor ", i, " in the arguments of ", region_name_,
        " was modified in place between its forward and its backward, which "
        "computes with it again: modify a copy"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<at::Tensor>> RegionArguments::Get() {
  if (moved_ == nullptr) return tensors_;
  FSDP_ASSIGN_OR_RETURN(std::vector<at::Tensor> tensors, moved_->MoveIn());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors_[i].defined()) tensors[i] = tensors_[i];
  }
  return tensors;
}

}  // namespace fsdp::checkpoint_internal
