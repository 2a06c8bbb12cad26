// A GPT: pre-LayerNorm transformer blocks between token and position
// embeddings and an untied head. Names, shapes and initial values are those of
// the PyTorch program in benchmarks/peers/peer_gpt.py.
#ifndef TESTING_GPT_MODEL_H_
#define TESTING_GPT_MODEL_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace gpt {

// Shape of the model.
struct GptConfig {
  int64_t vocab = 256;
  int64_t dim = 256;  // a multiple of heads
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t seq = 64;  // the longest input
};

// torch::nn::Linear adds its bias to inputs of three dimensions by a kernel of
// its own; here the matrix product adds it, as in Python.
class LinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;

  at::Tensor forward(const at::Tensor& x);
};
TORCH_MODULE(Linear);

class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(int64_t dim, int64_t heads);

  // Keeps the shape [batch, tokens, dim].
  at::Tensor forward(const at::Tensor& x);

 private:
  at::Tensor Attention(const at::Tensor& x);

  const int64_t heads_;
  torch::nn::LayerNorm ln1_, ln2_;
  Linear qkv_, proj_, fc_, out_;
};
TORCH_MODULE(Block);

class GptImpl : public torch::nn::Module {
 public:
  // With `checkpointing` each block keeps only its input for backward, without
  // the library's sharding.
  explicit GptImpl(const GptConfig& config, bool checkpointing = false);

  // Turns tokens [batch, tokens] in [0, vocab), int64, at most config.seq of
  // them, into logits [batch, tokens, vocab].
  at::Tensor forward(const at::Tensor& tokens);

 private:
  const bool checkpointing_;
  torch::nn::Embedding wte_, wpe_;
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm ln_;
  torch::nn::Linear head_;
};
TORCH_MODULE(Gpt);

// Sets every parameter to what `torch.manual_seed(seed)` followed by the
// construction of the model gives. Unlike the constructors, which draw from the
// generator that all threads of a process share, it depends on `seed` alone.
void InitializeParameters(GptImpl& model, uint64_t seed);

// Returns the mean cross entropy in nats of logits [batch, tokens, vocab]
// against targets [batch, tokens].
at::Tensor NextTokenLoss(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace gpt

#endif  // TESTING_GPT_MODEL_H_
