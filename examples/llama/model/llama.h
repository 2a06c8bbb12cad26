// The decoder-only transformer of Llama, Qwen2 and Qwen3. Its parameters have
// the names, shapes and values of Hugging Face's.
//
//   FSDP_ASSIGN_OR_RETURN(const LlamaConfig config, ParseLlamaConfig(text));
//   CausalLm model(config);
//   status = fsdp::checkpoint::LoadModel(folder, *model);
//   at::Tensor logits = model->forward(tokens);
//
// To generate tokens one by one:
//   KvCache cache = MakeKvCache(config, /*batch=*/1, /*max_tokens=*/512, {});
//   at::Tensor logits = model->Continue(prompt, cache);  // [1, vocab_size]
//   logits = model->Continue(logits.argmax(-1, /*keepdim=*/true), cache);
#ifndef EXAMPLES_LLAMA_MODEL_LLAMA_H_
#define EXAMPLES_LLAMA_MODEL_LLAMA_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "adapters/linear.h"
#include "examples/llama/model/attention.h"
#include "examples/llama/model/llama_config.h"

namespace llama {

// Targets of this value do not count.
inline constexpr int64_t kIgnoredTarget = -100;

// Returns the mean cross entropy in nats of the logits `hidden` x `weight`
// transposed against `targets`, over targets that are not kIgnoredTarget. If
// all are, it is NaN with gradients of zero, as in torch's cross_entropy.
//   hidden [tokens, dim], weight [vocab, dim], of one floating-point dtype
//   targets int64 [tokens], in [0, vocab) or kIgnoredTarget
// The result has no dimensions. It is float64 for float64, otherwise float32.
// Logits and the losses of a chunk are reduced in that dtype, and gradients
// summed over chunks in it; the sums of chunks are added in float64.
//
// The gradients are computed along with the loss, `chunk_rows` tokens at a
// time, and backward only scales them: it comes next, so nothing else is in
// memory for it, and logits are multiplied once, not twice. Neither `weight`
// nor `hidden` is kept. Memory besides the gradients: one chunk of logits, and
// in bfloat16 one more in float32 where device_ops has no kernel; and in
// bfloat16, until the loss is there, the gradient of `weight` in float32.
//
// Throws StatusError (Unimplemented) in backward, if gradients of gradients are
// asked for. For a target outside of the vocabulary it does what
// fsdp::device_ops::CrossEntropyOfRows() does, which throws on CPUs.
at::Tensor ChunkedCrossEntropy(const at::Tensor& hidden,
                               const at::Tensor& weight,
                               const at::Tensor& targets,
                               int64_t chunk_rows = 512);

// The modules below "model" in Hugging Face's names; CausalLmImpl runs them.
class DecoderImpl : public torch::nn::Module {
 public:
  explicit DecoderImpl(const LlamaConfig& config);

  torch::nn::Embedding embed_tokens;
  torch::nn::ModuleList layers;
  RmsNorm norm;
};
TORCH_MODULE(Decoder);

// The untied head. It computes with its own weight alone: without an adapter
// and not in int8.
class HeadImpl : public fsdp::adapters::LinearImpl {
 public:
  using fsdp::adapters::LinearImpl::LinearImpl;

  // [batch, tokens, hidden_size] -> what CausalLmImpl::forward() returns.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& targets);
};
TORCH_MODULE(Head);

// Has model and, unless the config ties it to the embedding, lm_head: a tied
// head is no parameter of its own, as in the files of such models. If files
// have a lm_head.weight all the same, use TensorRecipe::copies. Calls layers,
// embedding and head by fsdp::Forward(), but only a head that is not tied, and
// the embedding beside it, may be units of their own.
class CausalLmImpl : public torch::nn::Module {
 public:
  explicit CausalLmImpl(const LlamaConfig& config);

  // `tokens` are int64 [batch, tokens] in [0, vocab_size). Without targets it
  // returns logits [batch, tokens, vocab_size]. Targets have the shape of the
  // tokens, and are the next tokens, or kIgnoredTarget for padding and at the
  // end of a document; with them it returns their ChunkedCrossEntropy().
  at::Tensor forward(const at::Tensor& tokens,
                     const DocumentStarts& starts = {},
                     const at::Tensor& targets = {});

  // `tokens` are int64 [batch, tokens], at least one, which come behind those
  // in `cache` and are added to it. Returns the logits of the last one, [batch,
  // vocab_size], as forward() of all tokens does, without gradients; or those
  // of `last`, int64, indices into all of `tokens`. Not for sharded models. The
  // cache has room for them.
  at::Tensor Continue(const at::Tensor& tokens, KvCache& cache,
                      const at::Tensor& last = {});

  // Computes one token of each sequence, `tokens` [batch], at `positions`
  // [batch], both int64, and adds it to `cache` there, whose KvCache::tokens
  // stays: sequences may be of different lengths, and what a sequence has at
  // and behind its position does not count. Positions are below `end`, which is
  // at most KvCache::max_tokens. Returns logits [batch, vocab_size], without
  // gradients. The host sees no values, so that a DeviceGraph can capture all
  // calls but the first, which makes KvCache::tables.
  at::Tensor Step(const at::Tensor& tokens, const at::Tensor& positions,
                  KvCache& cache, int64_t end);

 private:
  at::Tensor RunLayers(const at::Tensor& tokens, const RotaryTables& tables,
                       const KvCache& cache, const CachePlace& place);
  const at::Tensor& HeadWeight() const;

  const RopeConfig rope_;
  const int64_t head_dim_;
  Decoder model_;
  Head lm_head_{nullptr};  // null if it is tied
};
TORCH_MODULE(CausalLm);

// Initializes a model for training from scratch: embeddings and weights of
// linear layers by normal random numbers of mean 0 (`stddev` is
// LlamaConfig::initializer_range), biases and the padding token's embedding by
// 0, weights of norms by 1. Depends only on `seed` and the model. Not for
// sharded models.
void InitializeParameters(CausalLmImpl& model, uint64_t seed, double stddev);

// A layer of the model, which becomes a unit when the model is sharded.

// SwiGLU, with gate_proj, up_proj and down_proj.
class MlpImpl : public torch::nn::Module {
 public:
  explicit MlpImpl(const LlamaConfig& config);

  // [..., hidden_size] -> the same.
  at::Tensor forward(const at::Tensor& x);

 private:
  fsdp::adapters::Linear gate_proj_, up_proj_, down_proj_;
};
TORCH_MODULE(Mlp);

// Has self_attn, mlp, input_layernorm and post_attention_layernorm.
class DecoderLayerImpl : public torch::nn::Module {
 public:
  explicit DecoderLayerImpl(const LlamaConfig& config);

  // [batch, tokens, hidden_size] -> the same; see CausalAttention().
  at::Tensor forward(const at::Tensor& x, const RotaryTables& tables,
                     const DocumentStarts& starts);
  // See AttentionImpl::Continue().
  at::Tensor Continue(const at::Tensor& x, const RotaryTables& tables,
                      const LayerCache& cache, const CachePlace& place);

 private:
  at::Tensor AddMlp(const at::Tensor& x);

  Attention self_attn_;
  Mlp mlp_;
  RmsNorm input_layernorm_, post_attention_layernorm_;
};
TORCH_MODULE(DecoderLayer);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_MODEL_LLAMA_H_
