// The GPT of testing/gpt, with a choice of what it keeps for backward.
#ifndef BENCHMARKS_GPU_GPT_H_
#define BENCHMARKS_GPU_GPT_H_

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>

#include "benchmarks/gpu_run.h"
#include "fsdp/deferred/deferred_init.h"
#include "testing/gpt/model.h"

namespace fsdp::benchmarks {

class GpuGptImpl : public torch::nn::Module {
 public:
  // With `checkpointing` each block keeps only its input.
  GpuGptImpl(const gpt::GptConfig& config, bool checkpointing);

  // Turns tokens [batch, tokens] into logits [batch, tokens, vocab].
  at::Tensor forward(const at::Tensor& tokens);

 private:
  const bool checkpointing_;
  torch::nn::Embedding wte_, wpe_;
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm ln_;
  torch::nn::Linear head_;
};

// The data of a step: rows of numbers that count upwards, and the next of each.
struct CountingRows {
  CountingRows(const gpt::GptConfig& model, int64_t batch, c10::Device device);
  at::Tensor tokens;   // [batch, model.seq]
  at::Tensor targets;  // likewise
};

// Returns the loss, computed in fp32.
at::Tensor LossOf(const at::Tensor& logits, const CountingRows& rows);

// Modules whose random values are drawn by their own device: the host takes
// seconds for a billion of them.

// Call it within a DeferredInit: moves the parameters of `module` to `device`
// and `dtype`, and records the initialization of its layers again for there.
// Knows linear layers, embeddings and layer norms.
void DrawOn(c10::Device device, at::ScalarType dtype,
            torch::nn::Module& module);

// Returns what `make` returns, in `dtype` on the device of `place`, deferred:
// FullyShard() gives it values unit by unit, Materialize() all at once. The
// values are the same every time.
template <typename Make>
auto MakeOn(const Place& place, at::ScalarType dtype, const Make& make) {
  at::manual_seed(0);
  decltype(make()) module;
  {
    const DeferredInit deferred;
    module = make();
    DrawOn(place.device, dtype, *module);
  }
  return module;
}

}  // namespace fsdp::benchmarks

#endif  // BENCHMARKS_GPU_GPT_H_
