// One layer of the model: what becomes a unit when it is sharded.
#ifndef EXAMPLES_LLAMA_MODEL_DECODER_LAYER_H_
#define EXAMPLES_LLAMA_MODEL_DECODER_LAYER_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "adapters/linear.h"
#include "examples/llama/model/attention.h"
#include "examples/llama/model/documents.h"
#include "examples/llama/model/kv_cache.h"
#include "examples/llama/model/llama_config.h"
#include "examples/llama/model/rms_norm.h"
#include "examples/llama/model/rotary.h"

namespace llama {

// SwiGLU: gate_proj, up_proj and down_proj.
class MlpImpl : public torch::nn::Module {
 public:
  explicit MlpImpl(const LlamaConfig& config);

  // [..., hidden_size] -> the same.
  at::Tensor forward(const at::Tensor& x);

 private:
  fsdp::adapters::Linear gate_proj_, up_proj_, down_proj_;
};
TORCH_MODULE(Mlp);

// self_attn, mlp, input_layernorm and post_attention_layernorm.
class DecoderLayerImpl : public torch::nn::Module {
 public:
  explicit DecoderLayerImpl(const LlamaConfig& config);

  // [batch, tokens, hidden_size] -> the same; see CausalAttention().
  at::Tensor forward(const at::Tensor& x, const RotaryTables& tables,
                     const DocumentStarts& starts);
  // See AttentionImpl::Continue().
  at::Tensor Continue(const at::Tensor& x, const RotaryTables& tables,
                      const LayerCache& cache, int64_t past);

 private:
  at::Tensor AddMlp(const at::Tensor& x);

  Attention self_attn_;
  Mlp mlp_;
  RmsNorm input_layernorm_, post_attention_layernorm_;
};
TORCH_MODULE(DecoderLayer);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_MODEL_DECODER_LAYER_H_
