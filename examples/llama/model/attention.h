// Grouped-query attention.
#ifndef EXAMPLES_LLAMA_MODEL_ATTENTION_H_
#define EXAMPLES_LLAMA_MODEL_ATTENTION_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "adapters/linear.h"
#include "examples/llama/model/documents.h"
#include "examples/llama/model/kv_cache.h"
#include "examples/llama/model/llama_config.h"
#include "examples/llama/model/rms_norm.h"
#include "examples/llama/model/rotary.h"

namespace llama {

// Queries [batch, heads, tokens, head_dim], keys and values of fewer heads, of
// which each is that of as many neighbouring queries -> like the queries. Each
// token sees those before it and itself. With `starts`, which need a batch of
// one, only those of its own document: documents are computed one by one, so
// that no mask of tokens x tokens is made.
at::Tensor CausalAttention(const at::Tensor& queries, const at::Tensor& keys,
                           const at::Tensor& values,
                           const DocumentStarts& starts);

// The same for the last tokens of sequences: `queries` are theirs, keys and
// values those of all tokens.
at::Tensor ContinuedAttention(const at::Tensor& queries, const at::Tensor& keys,
                              const at::Tensor& values);

// q_proj, k_proj, v_proj, o_proj and, with qk_norm, q_norm and k_norm.
class AttentionImpl : public torch::nn::Module {
 public:
  explicit AttentionImpl(const LlamaConfig& config);

  // [batch, tokens, hidden_size] -> the same. `starts` as above.
  at::Tensor forward(const at::Tensor& x, const RotaryTables& tables,
                     const DocumentStarts& starts);
  // Behind the first `past` tokens of `cache`, which gets those of `x`.
  at::Tensor Continue(const at::Tensor& x, const RotaryTables& tables,
                      const LayerCache& cache, int64_t past);

 private:
  // Each [batch, heads, tokens, head_dim], turned where it has to be.
  struct Heads {
    at::Tensor queries, keys, values;
  };
  Heads Project(const at::Tensor& x, const RotaryTables& tables);
  at::Tensor Output(const at::Tensor& heads);

  const int64_t head_dim_;
  fsdp::adapters::Linear q_proj_, k_proj_, v_proj_, o_proj_;
  RmsNorm q_norm_{nullptr}, k_norm_{nullptr};  // null without qk_norm
};
TORCH_MODULE(Attention);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_MODEL_ATTENTION_H_
