// Grouped-query attention.
#ifndef EXAMPLES_LLAMA_MODEL_ATTENTION_H_
#define EXAMPLES_LLAMA_MODEL_ATTENTION_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <vector>

#include "adapters/linear.h"
#include "examples/llama/model/documents.h"
#include "examples/llama/model/llama_config.h"
#include "examples/llama/model/rope_config.h"

// Rotary position embeddings: pairs of a head's elements turn by angles that
// grow with the position.

namespace llama {

// Radians per token of each pair: float32 [head_dim
// / 2] on `device`, by the same roundings as transformers. Neither a parameter
// nor a buffer: it is computed where it is needed, so that casting a module,
// deferring it or loading one does not touch it.
at::Tensor InverseFrequencies(const RopeConfig& rope, int64_t head_dim,
                              c10::Device device);

// Both [tokens, head_dim].
struct RotaryTables {
  at::Tensor cos;
  at::Tensor sin;
};

// For the units of a sharded model, which take these as an argument.
template <typename Visit>
void VisitTensors(RotaryTables& tables, Visit visit) {
  visit(tables.cos);
  visit(tables.sin);
}

// Of `positions`, int64 [tokens], on their device; rounded to `dtype` last.
RotaryTables MakeRotaryTables(const RopeConfig& rope, int64_t head_dim,
                              const at::Tensor& positions,
                              c10::ScalarType dtype);

// `x` [batch, heads, tokens, head_dim], turned: element i is paired with
// element i + head_dim / 2.
at::Tensor Rotate(const at::Tensor& x, const RotaryTables& tables);

// What a model keeps of tokens that it has seen, so that each new one costs no
// more than itself.

// Both [batch, num_key_value_heads, max_tokens, head_dim]; what is behind
// KvCache::tokens is undefined.
struct LayerCache {
  at::Tensor keys;
  at::Tensor values;
};

// Of a batch of sequences that are equally long. To begin anew, set `tokens` to
// 0; to go back, to fewer.
struct KvCache {
  int64_t tokens = 0;  // of each sequence that it has
  int64_t batch = 0;
  int64_t max_tokens = 0;
  std::vector<LayerCache> layers;
};

// An empty one. `options` are those of the model's parameters: dtype, device.
KvCache MakeKvCache(const LlamaConfig& config, int64_t batch,
                    int64_t max_tokens, const at::TensorOptions& options);

// RMSNorm as Hugging Face's Llama has it.

class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(int64_t dim, double eps);

  // [..., dim] -> the same. Computed in float32 and rounded to the dtype of `x`
  // before it is multiplied by the weight: at::rms_norm multiplies first, which
  // is another value in bfloat16.
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;  // [dim], ones at first

 private:
  const double eps_;
};
TORCH_MODULE(RmsNorm);

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
