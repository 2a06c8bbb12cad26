#include "benchmarks/gpu_gpt.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <memory>

#include "base/check.h"
#include "fsdp/model/forward.h"
#include "fsdp/recompute/checkpoint.h"
#include "testing/gpt/model.h"

namespace fsdp::benchmarks {

GpuGptImpl::GpuGptImpl(const gpt::GptConfig& config, bool checkpointing)
    : checkpointing_(checkpointing),
      wte_(config.vocab, config.dim),
      wpe_(config.seq, config.dim),
      ln_(torch::nn::LayerNormOptions({config.dim})),
      head_(torch::nn::LinearOptions(config.dim, config.vocab).bias(false)) {
  for (int64_t i = 0; i < config.layers; ++i) {
    blocks_->push_back(gpt::Block(config.dim, config.heads));
  }
  register_module("wte", wte_);
  register_module("wpe", wpe_);
  register_module("blocks", blocks_);
  register_module("ln", ln_);
  register_module("head", head_);
}

at::Tensor GpuGptImpl::forward(const at::Tensor& tokens) {
  const at::Tensor positions = at::arange(tokens.size(1), tokens.options());
  at::Tensor x = wte_->forward(tokens) + wpe_->forward(positions);
  CheckpointOptions options;
  options.preserve_rng_state = false;  // nothing in a block is random
  for (const std::shared_ptr<torch::nn::Module>& block : *blocks_) {
    const auto run = [block](const at::Tensor& input) {
      return Forward(*block->as<gpt::BlockImpl>(), input);
    };
    x = checkpointing_ ? CheckpointWith(options, run, x) : run(x);
  }
  return head_->forward(ln_->forward(x));
}

CountingRows::CountingRows(const gpt::GptConfig& model, int64_t batch,
                           c10::Device device) {
  const at::Tensor counts = at::arange(model.seq + 1, at::kLong);
  const at::Tensor starts = at::arange(batch, at::kLong) * 31;
  const at::Tensor rows =
      (starts.unsqueeze(1) + counts.unsqueeze(0)).remainder(model.vocab);
  tokens = rows.narrow(1, 0, model.seq).contiguous().to(device);
  targets = rows.narrow(1, 1, model.seq).contiguous().to(device);
}

at::Tensor LossOf(const at::Tensor& logits, const CountingRows& rows) {
  return gpt::NextTokenLoss(logits.to(at::kFloat), rows.targets);
}

void DrawOn(c10::Device device, at::ScalarType dtype,
            torch::nn::Module& module) {
  FSDP_CHECK(DeferredInit::IsActive());
  const c10::NoGradGuard no_grad;
  for (at::Tensor& parameter : module.parameters()) {
    const at::Tensor there =
        at::empty(parameter.sizes(), at::TensorOptions(device).dtype(dtype));
    // set_data() does the same, but not for every device.
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
