#include "examples/llama/model/llama.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstddef>
#include <limits>

#include "absl/status/status.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "device_ops/fused_layers.h"
#include "fsdp/model/forward.h"

namespace llama {
namespace {

using fsdp::StatusError;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Adds a * b to `sum`, whose dtype is theirs or float32.
void AddProduct(const at::Tensor& a, const at::Tensor& b, at::Tensor& sum) {
  if (sum.scalar_type() == a.scalar_type()) {
    sum.addmm_(a, b);
  } else if (sum.is_cuda()) {
    // Other devices have no product of halves that is not rounded to them.
    at::addmm_out(sum, sum, a, b, /*out_dtype=*/at::kFloat);
  } else {
    sum += at::mm(a, b);
  }
}

// The gradients are sums over chunks, which at the end are divided by the
// number of targets that count.
class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& hidden,
                            const at::Tensor& weight, const at::Tensor& targets,
                            int64_t chunk_rows, bool hidden_gradient,
                            bool weight_gradient) {
    const c10::ScalarType exact = at::toOpMathType(hidden.scalar_type());
    const at::TensorOptions options = hidden.options();
    at::Tensor loss = at::zeros({}, options.dtype(at::kDouble));
    at::Tensor of_hidden, of_weight;  // gradients; undefined: not wanted
    if (hidden_gradient) of_hidden = at::empty_like(hidden);
    if (weight_gradient) {
      of_weight = at::zeros(weight.sizes(), options.dtype(exact));
    }
    const bool wants_gradient = hidden_gradient || weight_gradient;
    const int64_t rows = hidden.size(0);
    for (int64_t begin = 0; begin < rows; begin += chunk_rows) {
      const int64_t end = std::min(begin + chunk_rows, rows);
      const at::Tensor x = hidden.slice(0, begin, end);
      const at::Tensor logits = at::mm(x, weight.t());
      loss += fsdp::device_ops::CrossEntropyOfRows(
                  logits, targets.slice(0, begin, end), kIgnoredTarget,
                  wants_gradient)
                  .sum();
      // The logits have become their gradient.
      if (hidden_gradient) {
        at::Tensor out = of_hidden.slice(0, begin, end);
        at::mm_out(out, logits, weight);
      }
      if (weight_gradient) AddProduct(logits.t(), x, of_weight);
    }
    const at::Tensor number = targets.ne(kIgnoredTarget).sum();
    const at::Tensor divisor = number.clamp_min(1);
    if (hidden_gradient) of_hidden.div_(divisor);
    if (weight_gradient) {
      // Each gradient has the dtype of what it is a gradient of.
      const at::Tensor sum = of_weight;
      if (exact != weight.scalar_type()) of_weight = at::empty_like(weight);
      at::div_out(of_weight, sum, divisor);
    }
    context->save_for_backward({of_hidden, of_weight});
    return (loss / number).to(exact);
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    if (c10::GradMode::is_enabled()) {
      throw StatusError(absl::UnimplementedError(
          "ChunkedCrossEntropy has no gradient of its gradient: call backward "
          "without create_graph, or use at::cross_entropy_loss"));
    }
    variable_list results(6);
    const variable_list saved = context->get_saved_variables();
    for (int i = 0; i < 2; ++i) {
      if (saved[i].defined()) results[i] = saved[i] * gradients[0];
    }
    return results;
  }
};

}  // namespace

at::Tensor ChunkedCrossEntropy(const at::Tensor& hidden,
                               const at::Tensor& weight,
                               const at::Tensor& targets, int64_t chunk_rows) {
  FSDP_CHECK(targets.size(0) == hidden.size(0) && chunk_rows > 0);
  const bool records = c10::GradMode::is_enabled();
  return CrossEntropy::apply(hidden, weight, targets, chunk_rows,
                             records && hidden.requires_grad(),
                             records && weight.requires_grad());
}

namespace {

using torch::nn::EmbeddingOptions;
using torch::nn::LinearOptions;

EmbeddingOptions EmbeddingOf(const LlamaConfig& config) {
  EmbeddingOptions options(config.vocab_size, config.hidden_size);
  if (config.pad_token_id) options.padding_idx(*config.pad_token_id);
  return options;
}

at::Tensor ApplyHead(const at::Tensor& x, const at::Tensor& weight,
                     const at::Tensor& targets) {
  if (!targets.defined()) return at::linear(x, weight);
  // For each chunk a GPU reads and writes the gradient of the weight once,
  // which takes as long as the products of 512 rows do.
  return ChunkedCrossEntropy(x.flatten(0, 1), weight, targets.flatten(),
                             /*chunk_rows=*/x.is_cuda() ? 2048 : 512);
}

}  // namespace

DecoderImpl::DecoderImpl(const LlamaConfig& config)
    : embed_tokens(EmbeddingOf(config)),
      norm(config.hidden_size, config.rms_norm_eps) {
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    layers->push_back(DecoderLayer(config));
  }
  register_module("embed_tokens", embed_tokens);
  register_module("layers", layers);
  register_module("norm", norm);
}

at::Tensor HeadImpl::forward(const at::Tensor& x, const at::Tensor& targets) {
  return ApplyHead(x, weight, targets);
}

CausalLmImpl::CausalLmImpl(const LlamaConfig& config)
    : rope_(config.rope), head_dim_(config.head_dim), model_(config) {
  register_module("model", model_);
  if (config.tie_word_embeddings) return;
  lm_head_ = register_module(
      "lm_head",
      Head(LinearOptions(config.hidden_size, config.vocab_size).bias(false)));
}

at::Tensor CausalLmImpl::forward(const at::Tensor& tokens,
                                 const DocumentStarts& starts,
                                 const at::Tensor& targets) {
  FSDP_CHECK(!targets.defined() || targets.sizes() == tokens.sizes());
  // Documents of all rows are laid out one after the other in a single row.
  const at::Tensor rows = starts.empty() ? tokens : tokens.reshape({1, -1});
  const at::Tensor positions =
      starts.empty() ? at::arange(tokens.size(1), tokens.options())
                     : at::tensor(DocumentPositions(starts, tokens.numel()))
                           .to(tokens.device());
  at::Tensor x = fsdp::Forward(model_->embed_tokens, rows);
  const RotaryTables tables =
      MakeRotaryTables(rope_, head_dim_, positions, x.scalar_type());
  for (const auto& layer : *model_->layers) {
    x = fsdp::Forward(*layer->as<DecoderLayerImpl>(), x, tables, starts);
  }
  x = model_->norm->forward(x).view({tokens.size(0), tokens.size(1), -1});
  return lm_head_.is_empty() ? ApplyHead(x, HeadWeight(), targets)
                             : fsdp::Forward(lm_head_, x, targets);
}

at::Tensor CausalLmImpl::Continue(const at::Tensor& tokens, KvCache& cache,
                                  const at::Tensor& last) {
  const c10::NoGradGuard no_grad;
  const int64_t end = cache.tokens + tokens.size(1);
  FSDP_CHECK(tokens.size(0) == cache.batch && end <= cache.max_tokens);
  const RotaryTables tables = MakeRotaryTables(
      rope_, head_dim_, at::arange(cache.tokens, end, tokens.options()),
      model_->embed_tokens->weight.scalar_type());
  const at::Tensor x = RunLayers(tokens, tables, cache, {end});
  cache.tokens = end;
  // The logits of all tokens of a prompt would be larger than the model.
  return at::linear(
      last.defined() ? x.flatten(0, 1).index_select(0, last) : x.select(1, -1),
      HeadWeight());
}

at::Tensor CausalLmImpl::Step(const at::Tensor& tokens,
                              const at::Tensor& positions, KvCache& cache,
                              int64_t end) {
  const c10::NoGradGuard no_grad;
  const at::Tensor& keys = cache.layers.front().keys;
  if (!cache.tables.cos.defined()) {
    cache.tables =
        TablesOfLastTokens(rope_, head_dim_, cache.max_tokens, keys.options());
  }
  const at::Tensor is_behind =
      at::arange(end, positions.options()) > positions.unsqueeze(1);
  CachePlace place;
  place.end = end;
  place.slots =
      positions.view({-1, 1, 1, 1}).expand({-1, keys.size(1), 1, keys.size(3)});
  place.mask =
      at::zeros(is_behind.sizes(), keys.options())
          .masked_fill_(is_behind, -std::numeric_limits<double>::infinity())
          .view({-1, 1, 1, end});
  const RotaryTables tables = {cache.tables.cos.index_select(0, positions),
                               cache.tables.sin.index_select(0, positions)};
  return at::linear(
      RunLayers(tokens.unsqueeze(0), tables, cache, place).squeeze(0),
      HeadWeight());
}

at::Tensor CausalLmImpl::RunLayers(const at::Tensor& tokens,
                                   const RotaryTables& tables,
                                   const KvCache& cache,
                                   const CachePlace& place) {
  at::Tensor x = model_->embed_tokens->forward(tokens);
  for (size_t i = 0; i < model_->layers->size(); ++i) {
    x = model_->layers->at<DecoderLayerImpl>(i).Continue(
        x, tables, cache.layers[i], place);
  }
  return model_->norm->forward(x);
}

const at::Tensor& CausalLmImpl::HeadWeight() const {
  return lm_head_.is_empty() ? model_->embed_tokens->weight : lm_head_->weight;
}

void InitializeParameters(CausalLmImpl& model, uint64_t seed, double stddev) {
  const c10::NoGradGuard no_grad;
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (const auto& module : model.modules(/*include_self=*/false)) {
    if (auto* embedding = module->as<torch::nn::EmbeddingImpl>()) {
      embedding->weight.normal_(0, stddev, generator);
      const auto padding = embedding->options.padding_idx();
      if (padding) embedding->weight[*padding].zero_();
    } else if (auto* linear = module->as<fsdp::adapters::LinearImpl>()) {
      linear->weight.normal_(0, stddev, generator);
      if (linear->bias.defined()) linear->bias.zero_();
    } else if (auto* norm = module->as<RmsNormImpl>()) {
      norm->weight.fill_(1);
    }
  }
}

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
  return down_proj_->forward(
      fsdp::device_ops::SwiGlu(gate_proj_->forward(x), up_proj_->forward(x)));
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
                                      const LayerCache& cache,
                                      const CachePlace& place) {
  return AddMlp(x + self_attn_->Continue(input_layernorm_->forward(x), tables,
                                         cache, place));
}

at::Tensor DecoderLayerImpl::AddMlp(const at::Tensor& x) {
  return x + mlp_->forward(post_attention_layernorm_->forward(x));
}

}  // namespace llama
