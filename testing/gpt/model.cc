#include "testing/gpt/model.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <memory>
#include <vector>

#include "fsdp/model/forward.h"
#include "fsdp/recompute/checkpoint.h"

namespace gpt {

using torch::nn::LayerNormOptions;
using torch::nn::LinearOptions;

at::Tensor LinearImpl::forward(const at::Tensor& x) {
  return at::linear(x, weight, bias);
}

BlockImpl::BlockImpl(int64_t dim, int64_t heads)
    : heads_(heads),
      ln1_(LayerNormOptions({dim})),
      ln2_(LayerNormOptions({dim})),
      qkv_(dim, 3 * dim),
      proj_(dim, dim),
      fc_(dim, 4 * dim),
      out_(4 * dim, dim) {
  register_module("ln1", ln1_);
  register_module("qkv", qkv_);
  register_module("proj", proj_);
  register_module("ln2", ln2_);
  register_module("fc", fc_);
  register_module("out", out_);
}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  const at::Tensor y = x + Attention(ln1_->forward(x));
  return y + out_->forward(at::gelu(fc_->forward(ln2_->forward(y)), "tanh"));
}

at::Tensor BlockImpl::Attention(const at::Tensor& x) {
  const int64_t batch = x.size(0), tokens = x.size(1), dim = x.size(2);
  const std::vector<at::Tensor> qkv = qkv_->forward(x)
                                          .view({batch, tokens, 3, heads_, -1})
                                          .permute({2, 0, 3, 1, 4})
                                          .unbind(0);
  const at::Tensor y = at::scaled_dot_product_attention(
      qkv[0], qkv[1], qkv[2], /*attn_mask=*/std::nullopt, /*dropout_p=*/0.0,
      /*is_causal=*/true);
  return proj_->forward(y.transpose(1, 2).reshape({batch, tokens, dim}));
}

GptImpl::GptImpl(const GptConfig& config, bool checkpointing)
    : checkpointing_(checkpointing),
      wte_(config.vocab, config.dim),
      wpe_(config.seq, config.dim),
      ln_(LayerNormOptions({config.dim})),
      head_(LinearOptions(config.dim, config.vocab).bias(false)) {
  for (int64_t i = 0; i < config.layers; ++i) {
    blocks_->push_back(Block(config.dim, config.heads));
  }
  register_module("wte", wte_);
  register_module("wpe", wpe_);
  register_module("blocks", blocks_);
  register_module("ln", ln_);
  register_module("head", head_);
}

at::Tensor GptImpl::forward(const at::Tensor& tokens) {
  const at::Tensor positions = at::arange(tokens.size(1), tokens.options());
  at::Tensor x = wte_->forward(tokens) + wpe_->forward(positions);
  fsdp::CheckpointOptions options;
  options.preserve_rng_state = false;  // nothing in a block is random
  for (const std::shared_ptr<torch::nn::Module>& block : *blocks_) {
    const auto run = [block](const at::Tensor& input) {
      return fsdp::Forward(*block->as<BlockImpl>(), input);
    };
    x = checkpointing_ ? fsdp::CheckpointWith(options, run, x) : run(x);
  }
  return head_->forward(ln_->forward(x));
}

void InitializeParameters(GptImpl& model, uint64_t seed) {
  const c10::NoGradGuard no_grad;
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  // The order is that of construction, as in PyTorch.
  for (const auto& module : model.modules(/*include_self=*/false)) {
    if (auto* embedding = module->as<torch::nn::Embedding>()) {
      embedding->weight.normal_(0, 1, generator);
    } else if (auto* linear = module->as<torch::nn::Linear>()) {
      // Kaiming uniform with a = sqrt(5), by the same roundings as PyTorch.
      const auto fan_in = static_cast<double>(linear->weight.size(1));
      const double gain = std::sqrt(2.0 / (1.0 + std::pow(std::sqrt(5.0), 2)));
      const double bound = std::sqrt(3.0) * (gain / std::sqrt(fan_in));
      linear->weight.uniform_(-bound, bound, generator);
      if (!linear->bias.defined()) continue;
      const double bias_bound = 1 / std::sqrt(fan_in);
      linear->bias.uniform_(-bias_bound, bias_bound, generator);
    } else if (auto* norm = module->as<torch::nn::LayerNorm>()) {
      norm->weight.fill_(1);
      norm->bias.zero_();
    }
  }
}

at::Tensor NextTokenLoss(const at::Tensor& logits, const at::Tensor& targets) {
  return at::cross_entropy_loss(logits.view({-1, logits.size(-1)}),
                                targets.reshape(-1));
}

}  // namespace gpt
