#include "examples/llama/model/attention.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/check.h"
#include "examples/llama/model/documents.h"
#include "examples/llama/model/llama_config.h"
#include "examples/llama/model/rms_norm.h"
#include "examples/llama/model/rotary.h"

namespace llama {
namespace {

using torch::nn::LinearOptions;

at::Tensor OfOneDocument(const at::Tensor& queries, const at::Tensor& keys,
                         const at::Tensor& values) {
  // Some of LibTorch's kernels refuse to be asked for groups, even of one.
  return at::scaled_dot_product_attention(
      queries, keys, values, /*attn_mask=*/std::nullopt, /*dropout_p=*/0.0,
      /*is_causal=*/true, /*scale=*/std::nullopt,
      /*enable_gqa=*/queries.size(1) != keys.size(1));
}

// [batch, tokens, heads * head_dim] -> [batch, tokens, heads, head_dim].
at::Tensor Heads(const at::Tensor& x, int64_t head_dim) {
  return x.unflatten(-1, {-1, head_dim});
}

}  // namespace

at::Tensor CausalAttention(const at::Tensor& queries, const at::Tensor& keys,
                           const at::Tensor& values,
                           const DocumentStarts& starts) {
  if (starts.empty()) return OfOneDocument(queries, keys, values);
  FSDP_CHECK(queries.size(0) == 1);
  const std::vector<int64_t> lengths = DocumentLengths(starts, queries.size(2));
  // Backward of a split is one concatenation, that of a slice as large as all.
  const auto q = queries.split_with_sizes(lengths, 2);
  const auto k = keys.split_with_sizes(lengths, 2);
  const auto v = values.split_with_sizes(lengths, 2);
  std::vector<at::Tensor> outputs;
  outputs.reserve(lengths.size());
  for (size_t i = 0; i < lengths.size(); ++i) {
    outputs.push_back(OfOneDocument(q[i], k[i], v[i]));
  }
  return at::cat(outputs, 2);
}

AttentionImpl::AttentionImpl(const LlamaConfig& config)
    : head_dim_(config.head_dim),
      q_proj_(LinearOptions(config.hidden_size,
                            config.num_attention_heads * config.head_dim)
                  .bias(config.qkv_bias)),
      k_proj_(LinearOptions(config.hidden_size,
                            config.num_key_value_heads * config.head_dim)
                  .bias(config.qkv_bias)),
      v_proj_(LinearOptions(config.hidden_size,
                            config.num_key_value_heads * config.head_dim)
                  .bias(config.qkv_bias)),
      o_proj_(LinearOptions(config.num_attention_heads * config.head_dim,
                            config.hidden_size)
                  .bias(config.output_bias)) {
  register_module("q_proj", q_proj_);
  register_module("k_proj", k_proj_);
  register_module("v_proj", v_proj_);
  register_module("o_proj", o_proj_);
  if (!config.qk_norm) return;
  q_norm_ =
      register_module("q_norm", RmsNorm(config.head_dim, config.rms_norm_eps));
  k_norm_ =
      register_module("k_norm", RmsNorm(config.head_dim, config.rms_norm_eps));
}

at::Tensor AttentionImpl::forward(const at::Tensor& x,
                                  const RotaryTables& tables,
                                  const DocumentStarts& starts) {
  at::Tensor q = Heads(q_proj_->forward(x), head_dim_);
  at::Tensor k = Heads(k_proj_->forward(x), head_dim_);
  const at::Tensor v = Heads(v_proj_->forward(x), head_dim_);
  if (!q_norm_.is_empty()) {
    q = q_norm_->forward(q);
    k = k_norm_->forward(k);
  }
  const at::Tensor y = CausalAttention(Rotate(q.transpose(1, 2), tables),
                                       Rotate(k.transpose(1, 2), tables),
                                       v.transpose(1, 2), starts);
  return o_proj_->forward(y.transpose(1, 2).flatten(2));
}

}  // namespace llama
