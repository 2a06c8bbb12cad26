#include "examples/llama/model/attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <optional>

#include "base/check.h"
#include "device_ops/fused_layers.h"

namespace llama {

namespace {

// Returns the number of tokens of each document, of `all` tokens.
std::vector<int64_t> DocumentLengths(absl::Span<const int64_t> starts,
                                     int64_t all) {
  std::vector<int64_t> lengths(starts.size());
  for (size_t i = 0; i < starts.size(); ++i) {
    lengths[i] = (i + 1 < starts.size() ? starts[i + 1] : all) - starts[i];
  }
  return lengths;
}

}  // namespace

std::vector<int64_t> DocumentPositions(absl::Span<const int64_t> starts,
                                       int64_t all) {
  std::vector<int64_t> positions;
  positions.reserve(static_cast<size_t>(all));
  for (const int64_t length : DocumentLengths(starts, all)) {
    positions.resize(positions.size() + static_cast<size_t>(length));
    std::iota(positions.end() - length, positions.end(), 0);
  }
  return positions;
}

namespace {

using Type = RopeScaling::Type;

// Scales from the pair that turns `high` times in scaling.tokens, which stays,
// to the one that turns `low` times, which is divided by the factor.
at::Tensor ScaledByYarn(const at::Tensor& frequencies, const RopeConfig& rope) {
  const RopeScaling& scaling = *rope.scaling;
  const auto pairs = static_cast<double>(frequencies.numel());
  const auto pair_of = [&](double turns) {
    const double pi = std::acos(-1.0);
    const double wavelength = static_cast<double>(scaling.tokens) / turns;
    return pairs * std::log(wavelength / (2 * pi)) / std::log(rope.theta);
  };
  const double first = std::max(std::floor(pair_of(scaling.high)), 0.0);
  double last = std::min(std::ceil(pair_of(scaling.low)), 2 * pairs - 1);
  if (first == last) last += 0.001;
  const at::Tensor scaled =
      ((at::arange(frequencies.numel(), frequencies.options()) - first) /
       (last - first))
          .clamp(0, 1);
  return frequencies / scaling.factor * scaled + frequencies * (1 - scaled);
}

at::Tensor Scaled(const at::Tensor& frequencies, const RopeConfig& rope) {
  const RopeScaling& scaling = *rope.scaling;
  if (scaling.type == Type::kDynamic) return frequencies;
  if (scaling.type == Type::kLinear) return frequencies / scaling.factor;
  if (scaling.type == Type::kYarn) return ScaledByYarn(frequencies, rope);
  const double pi = std::acos(-1.0);
  const auto tokens = static_cast<double>(scaling.tokens);
  const double low = scaling.low, high = scaling.high;
  const at::Tensor wavelengths = frequencies.reciprocal() * (2 * pi);
  const at::Tensor is_long = wavelengths > tokens / low;
  const at::Tensor is_short = wavelengths < tokens / high;
  const at::Tensor smooth =
      (wavelengths.reciprocal() * tokens - low) / (high - low);
  const at::Tensor between =
      (1 - smooth) * frequencies / scaling.factor + smooth * frequencies;
  return at::where(is_long, frequencies / scaling.factor,
                   at::where(is_short, frequencies, between));
}

}  // namespace

at::Tensor InverseFrequencies(const RopeConfig& rope, int64_t head_dim,
                              c10::Device device) {
  const auto options = c10::TensorOptions(at::kFloat).device(device);
  const at::Tensor exponents =
      at::arange(0, head_dim, 2, options) / static_cast<double>(head_dim);
  const at::Tensor frequencies = at::pow(rope.theta, exponents).reciprocal();
  return rope.scaling ? Scaled(frequencies, rope) : frequencies;
}

RotaryTables MakeRotaryTables(const RopeConfig& rope, int64_t head_dim,
                              const at::Tensor& positions,
                              c10::ScalarType dtype) {
  RopeConfig used = rope;
  if (rope.scaling && rope.scaling->type == Type::kDynamic &&
      positions.numel() > 0) {
    const double longer = (positions.max().item<double>() + 1) /
                          static_cast<double>(rope.scaling->tokens);
    const auto size = static_cast<double>(head_dim);
    used.theta *=
        std::pow(rope.scaling->factor * (std::max(longer, 1.0) - 1) + 1,
                 size / (size - 2));
  }
  const at::Tensor half =
      positions.to(at::kFloat).unsqueeze(-1) *
      InverseFrequencies(used, head_dim, positions.device());
  const at::Tensor angles = at::cat({half, half}, -1);
  const double factor = rope.scaling ? rope.scaling->attention_factor : 1;
  return {(angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)};
}

RotaryTables TablesOfLastTokens(const RopeConfig& rope, int64_t head_dim,
                                int64_t tokens,
                                const at::TensorOptions& options) {
  const bool is_dynamic =
      rope.scaling.has_value() && rope.scaling->type == Type::kDynamic;
  // A dynamic scaling reads each position, for which a host waits for a device.
  const c10::Device device = is_dynamic ? at::kCPU : options.device();
  std::vector<at::Tensor> cos, sin;
  for (const at::Tensor& positions :
       at::arange(tokens, at::TensorOptions(at::kLong).device(device))
           .split(is_dynamic ? 1 : tokens)) {
    const RotaryTables tables = MakeRotaryTables(
        rope, head_dim, positions, c10::typeMetaToScalarType(options.dtype()));
    cos.push_back(tables.cos);
    sin.push_back(tables.sin);
  }
  return {at::cat(cos).to(options.device()), at::cat(sin).to(options.device())};
}

KvCache MakeKvCache(const LlamaConfig& config, int64_t batch,
                    int64_t max_tokens, const at::TensorOptions& options) {
  // What is masked must be finite.
  const auto make = [&] {
    return at::zeros(
        {batch, config.num_key_value_heads, max_tokens, config.head_dim},
        options);
  };
  KvCache cache;
  cache.batch = batch;
  cache.max_tokens = max_tokens;
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    cache.layers.push_back({make(), make()});
  }
  return cache;
}

RmsNormImpl::RmsNormImpl(int64_t dim, double eps)
    : weight(register_parameter("weight", at::ones({dim}))), eps_(eps) {}

at::Tensor RmsNormImpl::forward(const at::Tensor& x) {
  // LibTorch's kernel takes one dtype.
  if (x.is_cuda() && x.scalar_type() == weight.scalar_type()) {
    return at::rms_norm(x, weight.sizes(), weight, eps_);
  }
  const at::Tensor exact = x.to(at::kFloat);
  const at::Tensor mean_square = exact.square().mean(-1, /*keepdim=*/true);
  return weight * (exact * (mean_square + eps_).rsqrt()).to(x.scalar_type());
}

namespace {

using torch::nn::LinearOptions;

at::Tensor Attend(const at::Tensor& queries, const at::Tensor& keys,
                  const at::Tensor& values,
                  const std::optional<at::Tensor>& mask, bool is_causal) {
  // Some of LibTorch's kernels refuse enable_gqa, even for groups of one.
  return at::scaled_dot_product_attention(
      queries, keys, values, mask, /*dropout_p=*/0.0, is_causal,
      /*scale=*/std::nullopt,
      /*enable_gqa=*/queries.size(1) != keys.size(1));
}

at::Tensor OfOneDocument(const at::Tensor& queries, const at::Tensor& keys,
                         const at::Tensor& values) {
  return Attend(queries, keys, values, /*mask=*/std::nullopt,
                /*is_causal=*/true);
}

// Computes attention of one token, which sees all but what `mask` excludes. The
// queries that share a key are treated as tokens, so that no kernel repeats
// keys for them.
at::Tensor OfLastToken(const at::Tensor& queries, const at::Tensor& keys,
                       const at::Tensor& values,
                       const std::optional<at::Tensor>& mask) {
  const at::Tensor grouped =
      queries.squeeze(2).unflatten(1, {keys.size(1), -1});
  return Attend(grouped, keys, values, mask, /*is_causal=*/false)
      .flatten(1, 2)
      .unsqueeze(2);
}

// As CausalAttention() for the last tokens of sequences: `queries` are theirs,
// keys and values those of all.
at::Tensor ContinuedAttention(const at::Tensor& queries, const at::Tensor& keys,
                              const at::Tensor& values) {
  const int64_t tokens = queries.size(2), all = keys.size(2);
  if (tokens == all) return OfOneDocument(queries, keys, values);
  if (tokens == 1) return OfLastToken(queries, keys, values, std::nullopt);
  const at::Tensor sees =
      at::ones({tokens, all}, queries.options().dtype(at::kBool))
          .tril(all - tokens);
  return Attend(queries, keys, values, sees, /*is_causal=*/false);
}

// [batch, tokens, heads * head_dim] becomes [batch, tokens, heads, head_dim].
at::Tensor SplitHeads(const at::Tensor& x, int64_t head_dim) {
  return x.unflatten(-1, {-1, head_dim});
}

}  // namespace

at::Tensor CausalAttention(const at::Tensor& queries, const at::Tensor& keys,
                           const at::Tensor& values,
                           const DocumentStarts& starts) {
  if (starts.empty()) return OfOneDocument(queries, keys, values);
  FSDP_CHECK(queries.size(0) == 1);
  const std::vector<int64_t> lengths = DocumentLengths(starts, queries.size(2));
  // Backward of a split is one concatenation; that of each slice would be as
  // large as the whole.
  const auto q = queries.split_with_sizes(lengths, 2);
  const auto k = keys.split_with_sizes(lengths, 2);
  const auto v = values.split_with_sizes(lengths, 2);
  std::vector<at::Tensor> outputs;
  outputs.reserve(lengths.size());
  for (size_t i = 0; i < lengths.size(); ++i) {
    outputs.push_back(OfOneDocument(q[i], k[i], v[i]).transpose(1, 2));
  }
  // Tokens come first in memory, as the next layer wants them.
  return at::cat(outputs, 1).transpose(1, 2);
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
  const Heads heads = Project(x, tables);
  return Output(
      CausalAttention(heads.queries, heads.keys, heads.values, starts));
}

at::Tensor AttentionImpl::Continue(const at::Tensor& x,
                                   const RotaryTables& tables,
                                   const LayerCache& cache,
                                   const CachePlace& place) {
  const Heads heads = Project(x, tables);
  const at::Tensor keys = cache.keys.slice(2, 0, place.end);
  const at::Tensor values = cache.values.slice(2, 0, place.end);
  if (!place.slots.defined()) {
    const int64_t past = place.end - x.size(1);
    keys.slice(2, past).copy_(heads.keys);
    values.slice(2, past).copy_(heads.values);
    return Output(ContinuedAttention(heads.queries, keys, values));
  }
  // A row of one token of each sequence becomes sequences of one token.
  keys.scatter_(2, place.slots, heads.keys.transpose(0, 2));
  values.scatter_(2, place.slots, heads.values.transpose(0, 2));
  return Output(
      OfLastToken(heads.queries.transpose(0, 2), keys, values, place.mask)
          .transpose(0, 2));
}

AttentionImpl::Heads AttentionImpl::Project(const at::Tensor& x,
                                            const RotaryTables& tables) {
  at::Tensor q = SplitHeads(q_proj_->forward(x), head_dim_);
  at::Tensor k = SplitHeads(k_proj_->forward(x), head_dim_);
  const at::Tensor v = SplitHeads(v_proj_->forward(x), head_dim_);
  if (!q_norm_.is_empty()) {
    q = q_norm_->forward(q);
    k = k_norm_->forward(k);
  }
  const auto rotated = [&tables](const at::Tensor& x) {
    return fsdp::device_ops::RotateHalves(x.transpose(1, 2), tables.cos,
                                          tables.sin);
  };
  return {rotated(q), rotated(k), v.transpose(1, 2)};
}

at::Tensor AttentionImpl::Output(const at::Tensor& heads) {
  return o_proj_->forward(heads.transpose(1, 2).flatten(2));
}

}  // namespace llama
