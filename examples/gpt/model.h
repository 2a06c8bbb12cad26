// A byte-level GPT: pre-LayerNorm transformer blocks between embeddings of
// bytes and positions, and a head. It calls its blocks by fsdp::Forward();
// otherwise nothing in it knows of sharding.
#ifndef EXAMPLES_GPT_MODEL_H_
#define EXAMPLES_GPT_MODEL_H_

#include <torch/torch.h>

#include <cstdint>

namespace gpt {

inline constexpr int64_t kHeadWidth = 64;

struct GptConfig {
  int64_t layers = 4;
  int64_t width = 256;  // a multiple of kHeadWidth
  int64_t seq = 64;     // the longest input
};

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(int64_t width);

  // [rows, seq, width] -> the same.
  torch::Tensor forward(const torch::Tensor& x);

 private:
  torch::Tensor Attention(const torch::Tensor& x);

  torch::nn::LayerNorm ln1_, ln2_;
  torch::nn::Linear qkv_, proj_, fc_, out_;
};
TORCH_MODULE(Block);

class GptImpl : public torch::nn::Module {
 public:
  explicit GptImpl(const GptConfig& config);

  // Bytes as int64 [rows, seq] -> logits of the byte after each,
  // [rows, seq, 256].
  torch::Tensor forward(const torch::Tensor& bytes);

 private:
  torch::nn::Embedding wte_, wpe_;
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm ln_;
  torch::nn::Linear head_;
};
TORCH_MODULE(Gpt);

// Returns the mean cross entropy, in nats, of logits against targets [rows,
// seq].
torch::Tensor NextByteLoss(const torch::Tensor& logits,
                           const torch::Tensor& targets);

}  // namespace gpt

#endif  // EXAMPLES_GPT_MODEL_H_
