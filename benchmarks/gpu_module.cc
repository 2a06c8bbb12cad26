#include "benchmarks/gpu_module.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <memory>

#include "base/check.h"

namespace fsdp::benchmarks {

void DrawOn(c10::Device device, at::ScalarType dtype,
            torch::nn::Module& module) {
  FSDP_CHECK(DeferredInit::IsActive());
  const c10::NoGradGuard no_grad;
  for (at::Tensor& parameter : module.parameters()) {
    const at::Tensor there =
        at::empty(parameter.sizes(), at::TensorOptions(device).dtype(dtype));
    // As set_data() does, for any device.
    parameter.unsafeGetTensorImpl()->shallow_copy_from(there.getIntrusivePtr());
  }
  for (const std::shared_ptr<torch::nn::Module>& part : module.modules()) {
    if (auto* linear = part->as<torch::nn::Linear>()) {
      linear->reset_parameters();
    } else if (auto* embedding = part->as<torch::nn::Embedding>()) {
      embedding->reset_parameters();
    } else if (auto* norm = part->as<torch::nn::LayerNorm>()) {
      norm->reset_parameters();
    } else {
      FSDP_CHECK(part->parameters(/*recurse=*/false).empty());
    }
  }
}

}  // namespace fsdp::benchmarks
