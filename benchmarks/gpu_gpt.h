// The GPT of examples/gpt with a choice of what is kept for backward.
#ifndef BENCHMARKS_GPU_GPT_H_
#define BENCHMARKS_GPU_GPT_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "examples/gpt/options.h"

namespace fsdp::benchmarks {

class GpuGptImpl : public torch::nn::Module {
 public:
  // `checkpointing`: of each block only the input is kept.
  GpuGptImpl(const gpt::GptConfig& config, bool checkpointing);

  // Tokens [batch, tokens] -> logits [batch, tokens, vocab].
  at::Tensor forward(const at::Tensor& tokens);

 private:
  const bool checkpointing_;
  torch::nn::Embedding wte_, wpe_;
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm ln_;
  torch::nn::Linear head_;
};

}  // namespace fsdp::benchmarks

#endif  // BENCHMARKS_GPU_GPT_H_
