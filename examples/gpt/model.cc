#include "examples/gpt/model.h"

#include <vector>

#include "fsdp/model/forward.h"

namespace gpt {

BlockImpl::BlockImpl(int64_t width)
    : ln1_(torch::nn::LayerNormOptions({width})),
      ln2_(torch::nn::LayerNormOptions({width})),
      qkv_(width, 3 * width),
      proj_(width, width),
      fc_(width, 4 * width),
      out_(4 * width, width) {
  register_module("ln1", ln1_);
  register_module("qkv", qkv_);
  register_module("proj", proj_);
  register_module("ln2", ln2_);
  register_module("fc", fc_);
  register_module("out", out_);
}

torch::Tensor BlockImpl::forward(const torch::Tensor& x) {
  const torch::Tensor y = x + Attention(ln1_->forward(x));
  return y + out_->forward(torch::gelu(fc_->forward(ln2_->forward(y)), "tanh"));
}

torch::Tensor BlockImpl::Attention(const torch::Tensor& x) {
  const std::vector<torch::Tensor> qkv =
      qkv_->forward(x)
          .view({x.size(0), x.size(1), 3, -1, kHeadWidth})
          .permute({2, 0, 3, 1, 4})
          .unbind(0);
  const torch::Tensor y = torch::scaled_dot_product_attention(
      qkv[0], qkv[1], qkv[2], /*attn_mask=*/{}, /*dropout_p=*/0.0,
      /*is_causal=*/true);
  return proj_->forward(y.transpose(1, 2).reshape(x.sizes()));
}

GptImpl::GptImpl(const GptConfig& config)
    : wte_(256, config.width),
      wpe_(config.seq, config.width),
      ln_(torch::nn::LayerNormOptions({config.width})),
      head_(torch::nn::LinearOptions(config.width, 256).bias(false)) {
  for (int64_t i = 0; i < config.layers; ++i) {
    blocks_->push_back(Block(config.width));
  }
  register_module("wte", wte_);
  register_module("wpe", wpe_);
  register_module("blocks", blocks_);
  register_module("ln", ln_);
  register_module("head", head_);
}

torch::Tensor GptImpl::forward(const torch::Tensor& bytes) {
  const torch::Tensor places = torch::arange(bytes.size(1), bytes.options());
  torch::Tensor x = wte_->forward(bytes) + wpe_->forward(places);
  for (const auto& block : *blocks_) {
    x = fsdp::Forward(*block->as<BlockImpl>(), x);
  }
  return head_->forward(ln_->forward(x));
}

torch::Tensor NextByteLoss(const torch::Tensor& logits,
                           const torch::Tensor& targets) {
  return torch::nn::functional::cross_entropy(
      logits.view({-1, logits.size(-1)}), targets.reshape(-1));
}

}  // namespace gpt
