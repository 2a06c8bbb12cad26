#include "examples/llama/model/decoder_layer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/silu.h>

#include <cstdint>

#include "examples/llama/model/documents.h"
#include "examples/llama/model/kv_cache.h"
#include "examples/llama/model/llama_config.h"
#include "examples/llama/model/rotary.h"

namespace llama {

using torch::nn::LinearOptions;

MlpImpl::MlpImpl(const LlamaConfig& config)
    : gate_proj_(LinearOptions(config.hidden_size, config.intermediate_size)
                     .bias(config.mlp_bias)),
      up_proj_(LinearOptions(config.hidden_size, config.intermediate_size)
                   .bias(config.mlp_bias)),
      down_proj_(LinearOptions(config.intermediate_size, config.hidden_size)
                     .bias(config.mlp_bias)) {
  register_module("gate_proj", gate_proj_);
  register_module("up_proj", up_proj_);
  register_module("down_proj", down_proj_);
}

at::Tensor MlpImpl::forward(const at::Tensor& x) {
  return down_proj_->forward(at::silu(gate_proj_->forward(x)) *
                             up_proj_->forward(x));
}

DecoderLayerImpl::DecoderLayerImpl(const LlamaConfig& config)
    : self_attn_(config),
      mlp_(config),
      input_layernorm_(config.hidden_size, config.rms_norm_eps),
      post_attention_layernorm_(config.hidden_size, config.rms_norm_eps) {
  register_module("self_attn", self_attn_);
  register_module("mlp", mlp_);
  register_module("input_layernorm", input_layernorm_);
  register_module("post_attention_layernorm", post_attention_layernorm_);
}

at::Tensor DecoderLayerImpl::forward(const at::Tensor& x,
                                     const RotaryTables& tables,
                                     const DocumentStarts& starts) {
  return AddMlp(
      x + self_attn_->forward(input_layernorm_->forward(x), tables, starts));
}

at::Tensor DecoderLayerImpl::Continue(const at::Tensor& x,
                                      const RotaryTables& tables,
                                      const LayerCache& cache, int64_t past) {
  return AddMlp(x + self_attn_->Continue(input_layernorm_->forward(x), tables,
                                         cache, past));
}

at::Tensor DecoderLayerImpl::AddMlp(const at::Tensor& x) {
  return x + mlp_->forward(post_attention_layernorm_->forward(x));
}

}  // namespace llama
