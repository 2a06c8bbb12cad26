#include "fsdp/autograd/parameter_hooks.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <vector>

namespace fsdp {
namespace {

using Hooks = std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>;

// Those of the tensor itself, wherever its gradient edge leads.
const Hooks* HooksOf(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta == nullptr ? nullptr : &meta->hooks_;
}

}  // namespace

bool HasTensorHooks(const at::Tensor& tensor) {
  const Hooks* hooks = HooksOf(tensor);
  return hooks != nullptr && !hooks->empty();
}

bool HasPostAccumulateHooks(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && meta->post_acc_grad_hooks_ != nullptr;
}

at::Tensor RunTensorHooks(const at::Tensor& tensor,
                          const at::Tensor& gradient) {
  std::vector<at::Tensor> values = {gradient};
  for (const auto& hook : *HooksOf(tensor)) values = (*hook)(values);
  return values.front();
}

}  // namespace fsdp
