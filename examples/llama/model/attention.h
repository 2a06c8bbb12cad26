// Grouped-query attention inside of documents, with its position embeddings,
// cache and norm.
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

#include "absl/types/span.h"
#include "adapters/linear.h"
#include "examples/llama/model/llama_config.h"

namespace llama {

// Rows of tokens with several documents in each.

// The beginnings of documents: ascending indices into all tokens of a batch,
// row by row. {0, 3, 8, 10} are two documents in each of two rows of 8 tokens.
// Every row begins with a document, and padding at its end counts as one.
// Empty: every row is one document.
using DocumentStarts = std::vector<int64_t>;

// Returns the position in its document of each of `all` tokens.
std::vector<int64_t> DocumentPositions(absl::Span<const int64_t> starts,
                                       int64_t all);

// Rotary position embeddings turn pairs of a head's elements by angles that
// grow with the position.

// Returns radians per token of each pair, float32 [head_dim / 2] on `device`,
// rounded as in transformers. They are computed where needed, and no parameter
// or buffer, so that casting, deferring or loading a module does not touch
// them.
at::Tensor InverseFrequencies(const RopeConfig& rope, int64_t head_dim,
                              c10::Device device);

// Tables of fsdp::device_ops::RotateHalves(), both [tokens, head_dim].
struct RotaryTables {
  at::Tensor cos;
  at::Tensor sin;
};

// Lets units of a sharded model take the tables as an argument.
template <typename Visit>
void VisitTensors(RotaryTables& tables, Visit visit) {
  visit(tables.cos);
  visit(tables.sin);
}

// Returns the tables of `positions`, int64 [tokens], on their device. They are
// computed in float32 and then rounded to `dtype`.
RotaryTables MakeRotaryTables(const RopeConfig& rope, int64_t head_dim,
                              const at::Tensor& positions,
                              c10::ScalarType dtype);

// Returns the tables of positions 0 to `tokens` - 1, each as the last one of a
// sequence: a dynamic scaling depends on how long that is, and then the host
// waits once for each position.
RotaryTables TablesOfLastTokens(const RopeConfig& rope, int64_t head_dim,
                                int64_t tokens,
                                const at::TensorOptions& options);

// A cache keeps keys and values of the tokens that a model has seen, so that
// each new token costs only itself.

// Both are [batch, num_key_value_heads, max_tokens, head_dim].
struct LayerCache {
  at::Tensor keys;
  at::Tensor values;
};

// The cache of a batch of sequences.
struct KvCache {
  int64_t tokens = 0;  // that each sequence has got by Continue()
  int64_t batch = 0;
  int64_t max_tokens = 0;
  RotaryTables tables;  // TablesOfLastTokens(), from the first Step() on
  std::vector<LayerCache> layers;
};

// Returns an empty cache. `options` are dtype and device of the model's
// parameters.
KvCache MakeKvCache(const LlamaConfig& config, int64_t batch,
                    int64_t max_tokens, const at::TensorOptions& options);

// Where new tokens go in a cache, and what they see there: either equally many
// of each sequence, which go right before `end` and see what is before them, or
// one of each sequence, as a row of `batch` tokens, by `slots` and `mask`.
struct CachePlace {
  int64_t end = 0;  // the tokens that are looked at come before it
  // int64 [batch, num_key_value_heads, 1, head_dim]: the token's position.
  at::Tensor slots = {};
  // [batch, 1, 1, end], added to what the softmax gets: 0, or -infinity for
  // tokens that are not seen.
  at::Tensor mask = {};
};

// RMSNorm as Hugging Face's Llama computes it.

class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(int64_t dim, double eps);

  // [..., dim] -> the same. Computed in float32 and rounded to the dtype of `x`
  // before it is multiplied by the weight, and rounded again. CUDA's kernel
  // behind at::rms_norm(), which reads and writes `x` once, multiplies first:
  // its results in bfloat16 lack the first rounding.
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;  // [dim], ones at first

 private:
  const double eps_;
};
TORCH_MODULE(RmsNorm);

// Queries [batch, heads, tokens, head_dim], keys and values of fewer heads,
// each for equally many neighboring heads of queries -> like the queries. Each
// token sees itself and those before it; with `starts`, which needs a batch of
// one, only those of its own document: documents are computed one by one, so
// that no mask of tokens x tokens is made.
at::Tensor CausalAttention(const at::Tensor& queries, const at::Tensor& keys,
                           const at::Tensor& values,
                           const DocumentStarts& starts);

// Has q_proj, k_proj, v_proj, o_proj and, with qk_norm, q_norm and k_norm.
class AttentionImpl : public torch::nn::Module {
 public:
  explicit AttentionImpl(const LlamaConfig& config);

  // [batch, tokens, hidden_size] -> the same. `starts`: see CausalAttention().
  at::Tensor forward(const at::Tensor& x, const RotaryTables& tables,
                     const DocumentStarts& starts);
  // Computes `x` at its place in `cache`, and adds it there.
  at::Tensor Continue(const at::Tensor& x, const RotaryTables& tables,
                      const LayerCache& cache, const CachePlace& place);

 private:
  // Each is [batch, heads, tokens, head_dim]; queries and keys are turned.
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
