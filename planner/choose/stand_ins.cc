#include "planner/choose/stand_ins.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_error.h"
#include "fsdp/deferred/deferred_tensor.h"
#include "fsdp/precision/buffer_precision.h"
#include "fsdp/setup/module_tree.h"
#include "fsdp/setup/shard_plan.h"
#include "fsdp/setup/unit_plan.h"

namespace fsdp {
namespace {

// Makes zeros that need no memory until somebody writes: reading gives the
// system's one page of zeros.
at::Tensor UntouchedZeros(const at::Tensor& like, c10::ScalarType dtype) {
  const auto options = like.options().dtype(dtype).requires_grad(false);
  const int64_t bytes =
      like.numel() * static_cast<int64_t>(c10::elementSize(dtype));
  if (bytes == 0) {
    return at::empty_strided(like.sizes(), like.strides(), options);
  }
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw StatusError(absl::ErrnoToStatus(
        errno, absl::StrCat("addresses for ", bytes, " bytes of zeros")));
  }
  return at::from_blob(
      memory, like.sizes(), like.strides(),
      [bytes](void* address) { munmap(address, bytes); }, options);
}

at::Tensor ZerosLike(const at::Tensor& like, c10::ScalarType dtype) {
  if (like.is_cpu() && like.is_non_overlapping_and_dense()) {
    return UntouchedZeros(like, dtype);
  }
  return at::zeros({}, like.options().dtype(dtype).requires_grad(false))
      .expand(like.sizes());
}

class DropGradient final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit DropGradient(VanishingGradients::OnGradient on_gradient)
      : on_gradient_(std::move(on_gradient)) {}

  void operator()(const at::Tensor& parameter) override {
    on_gradient_(parameter.grad());
    parameter.mutable_grad().reset();
  }

 private:
  const VanishingGradients::OnGradient on_gradient_;
};

}  // namespace

StandIns::StandIns(const ShardPlan& plan) {
  try {
    ReplaceAll(plan);
  } catch (...) {
    Restore();
    throw;
  }
}

StandIns::~StandIns() { Restore(); }

void StandIns::ReplaceAll(const ShardPlan& plan) {
  for (const PlannedUnit& planned : plan.units) {
    for (size_t i = 0; i < planned.unit.parameters.size(); ++i) {
      const int parameter = planned.unit.parameters[i].parameter;
      const std::vector<at::Tensor>& tied = plan.tree.parameters[parameter];
      const c10::ScalarType dtype = planned.compute_dtypes[i];
      if (!IsDeferred(tied.front()) && tied.front().scalar_type() == dtype) {
        continue;
      }
      const at::Tensor zeros = ZerosLike(tied.front(), dtype);
      for (const at::Tensor& tensor : tied) Replace(tensor, zeros);
    }
  }
  const c10::NoGradGuard no_grad;
  for (const BufferPrecision::Buffer& buffer : plan.buffers) {
    if (IsDeferred(buffer.tensor) || buffer.wanted != buffer.original) {
      Replace(buffer.tensor, ZerosLike(buffer.tensor, buffer.wanted));
    } else {
      kept_.push_back({buffer.tensor, buffer.tensor.clone(), true});
    }
  }
}

// Keeps the tensor object, to which modules and graphs refer.
void StandIns::Replace(const at::Tensor& tensor, const at::Tensor& zeros) {
  kept_.push_back({tensor, tensor.variable_data(), false});
  tensor.unsafeGetTensorImpl()->shallow_copy_from(zeros.getIntrusivePtr());
}

void StandIns::Restore() {
  const c10::NoGradGuard no_grad;
  for (const Kept& kept : kept_) {
    if (kept.is_copy) {
      kept.tensor.copy_(kept.original);
    } else {
      kept.tensor.unsafeGetTensorImpl()->shallow_copy_from(
          kept.original.getIntrusivePtr());
    }
  }
}

VanishingGradients::VanishingGradients(const ShardPlan& plan,
                                       const OnGradient& on_gradient) {
  for (const auto& tied : plan.tree.parameters) {
    for (const at::Tensor& tensor : tied) {
      if (!tensor.requires_grad() || !tensor.is_leaf()) continue;
      auto& hook = torch::autograd::impl::post_acc_grad_hooks(tensor);
      kept_.push_back({tensor, tensor.grad(), std::move(hook)});
      tensor.mutable_grad().reset();
      hook = std::make_unique<DropGradient>(on_gradient);
    }
  }
}

VanishingGradients::~VanishingGradients() {
  for (Kept& kept : kept_) {
    torch::autograd::impl::post_acc_grad_hooks(kept.parameter) =
        std::move(kept.hook);
    kept.parameter.mutable_grad() = kept.gradient;
  }
}

}  // namespace fsdp
