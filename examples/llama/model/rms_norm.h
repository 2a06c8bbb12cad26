// RMSNorm as Hugging Face's Llama has it.
#ifndef EXAMPLES_LLAMA_MODEL_RMS_NORM_H_
#define EXAMPLES_LLAMA_MODEL_RMS_NORM_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace llama {

class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(int64_t dim, double eps);

  // [..., dim] -> the same. Computed in float32 and rounded to the dtype of `x`
  // before it is multiplied by the weight: at::rms_norm multiplies first, which
  // is another value in bfloat16.
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;  // [dim], ones at first

 private:
  const double eps_;
};
TORCH_MODULE(RmsNorm);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_MODEL_RMS_NORM_H_
