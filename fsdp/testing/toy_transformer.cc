#include "fsdp/testing/toy_transformer.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>

#include <cmath>
#include <vector>

#include "fsdp/model/forward.h"
#include "fsdp/testing/toy_model.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kHeads = 2;
constexpr int64_t kHeadWidth = kToyWidth / kHeads;

torch::nn::LayerNorm MakeNorm() {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({kToyWidth}));
}

}  // namespace

LayerImpl::LayerImpl()
    : ln1_(register_module("ln1", MakeNorm())),
      qkv_(register_module("qkv", torch::nn::Linear(kToyWidth, 3 * kToyWidth))),
      proj_(register_module("proj", torch::nn::Linear(kToyWidth, kToyWidth))),
      ln2_(register_module("ln2", MakeNorm())),
      fc_(register_module("fc", torch::nn::Linear(kToyWidth, 4 * kToyWidth))),
      out_(register_module("out",
                           torch::nn::Linear(4 * kToyWidth, kToyWidth))) {}

at::Tensor LayerImpl::Attend(const at::Tensor& x) {
  std::vector<at::Tensor> parts = qkv_->forward(x).chunk(3, -1);
  for (at::Tensor& part : parts) {
    part =
        part.view({x.size(0), x.size(1), kHeads, kHeadWidth}).transpose(1, 2);
  }
  const at::Tensor scores =
      parts[0].matmul(parts[1].transpose(2, 3)) / std::sqrt(double{kHeadWidth});
  return scores.softmax(-1).matmul(parts[2]).transpose(1, 2).reshape(x.sizes());
}

at::Tensor LayerImpl::forward(at::Tensor x) {
  x = x + proj_->forward(Attend(ln1_->forward(x)));
  return x + out_->forward(at::gelu(fc_->forward(ln2_->forward(x))));
}

at::Tensor TiedHeadImpl::forward(const at::Tensor& x) {
  return at::linear(x, weight_);
}

TransformerImpl::TransformerImpl(const ToyTransformerOptions& options)
    : embed_(register_module("embed",
                             torch::nn::Embedding(kToyVocabulary, kToyWidth))),
      layers_(register_module("layers", torch::nn::ModuleList())),
      ln_(register_module("ln", MakeNorm())),
      head_(register_module("head",
                            std::make_shared<TiedHeadImpl>(embed_->weight))) {
  if (options.batch_norm) {
    bn_ = register_module("bn", torch::nn::BatchNorm1d(kToyTokens));
  }
  for (int i = 0; i < options.layers; ++i) {
    layers_->push_back(std::make_shared<LayerImpl>());
  }
}

at::Tensor TransformerImpl::forward(const at::Tensor& tokens) {
  at::Tensor x = embed_->forward(tokens);
  if (bn_) x = bn_->forward(x);
  for (const std::shared_ptr<torch::nn::Module>& layer : *layers_) {
    x = Forward(*layer->as<LayerImpl>(), x);
  }
  return head_->forward(ln_->forward(x));
}

std::shared_ptr<TransformerImpl> MakeTransformer(
    const ToyTransformerOptions& options) {
  auto transformer = std::make_shared<TransformerImpl>(options);
  FillParameters(*transformer, 0);
  return transformer;
}

at::Tensor Sequences(int64_t begin, int64_t sequences) {
  constexpr int64_t kLength = kToyTokens + 1;
  const at::Tensor index =
      at::arange(begin * kLength, (begin + sequences) * kLength);
  return (index * index * 7 + index * 3)
      .remainder(kToyVocabulary)
      .view({sequences, kLength});
}

at::Tensor TransformerLoss(
    const std::function<at::Tensor(const at::Tensor&)>& forward,
    const at::Tensor& sequences) {
  const at::Tensor logits = forward(sequences.narrow(1, 0, kToyTokens));
  return at::cross_entropy_loss(
      logits.view({-1, kToyVocabulary}),
      sequences.narrow(1, 1, kToyTokens).reshape({-1}));
}

Options LayerUnits() { return UnitsOf<LayerImpl>(); }

}  // namespace fsdp::testing
