// A small language model whose head is tied to its embedding, and its data,
// without random numbers. tools/record_pytorch_figures.py has the same.
#ifndef FSDP_TESTING_TOY_TRANSFORMER_H_
#define FSDP_TESTING_TOY_TRANSFORMER_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "fsdp/options/options.h"

namespace fsdp::testing {

inline constexpr int64_t kToyVocabulary = 19;
inline constexpr int64_t kToyWidth = 8;
inline constexpr int64_t kToyTokens = 6;

// Attention over all tokens, then two linear layers.
class LayerImpl : public torch::nn::Module {
 public:
  LayerImpl();
  at::Tensor forward(at::Tensor x);

 private:
  at::Tensor Attend(const at::Tensor& x);

  torch::nn::LayerNorm ln1_;
  torch::nn::Linear qkv_;
  torch::nn::Linear proj_;
  torch::nn::LayerNorm ln2_;
  torch::nn::Linear fc_;
  torch::nn::Linear out_;
};

// Computes logits with a weight that another module has, too.
class TiedHeadImpl : public torch::nn::Module {
 public:
  explicit TiedHeadImpl(const at::Tensor& weight)
      : weight_(register_parameter("weight", weight)) {}
  at::Tensor forward(const at::Tensor& x);

 private:
  at::Tensor weight_;
};

struct ToyTransformerOptions {
  int layers = 2;
  bool batch_norm = false;  // of the embedded tokens
};

// Maps tokens [sequences, kToyTokens] to logits [sequences, kToyTokens,
// kToyVocabulary]; calls its layers by fsdp::Forward.
class TransformerImpl : public torch::nn::Module {
 public:
  explicit TransformerImpl(
      const ToyTransformerOptions& options = ToyTransformerOptions());
  at::Tensor forward(const at::Tensor& tokens);

 private:
  torch::nn::Embedding embed_;
  torch::nn::BatchNorm1d bn_{nullptr};
  torch::nn::ModuleList layers_;
  torch::nn::LayerNorm ln_;
  std::shared_ptr<TiedHeadImpl> head_;
};

// Returns a net with the values of FillParameters().
std::shared_ptr<TransformerImpl> MakeTransformer(
    const ToyTransformerOptions& options = ToyTransformerOptions());

// Returns sequences of kToyTokens + 1 tokens, of which the last ones are
// predicted.
at::Tensor Sequences(int64_t begin, int64_t sequences);
at::Tensor TransformerLoss(
    const std::function<at::Tensor(const at::Tensor&)>& forward,
    const at::Tensor& sequences);

Options LayerUnits();

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_TOY_TRANSFORMER_H_
