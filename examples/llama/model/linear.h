// Linear layers as Python has them.
#ifndef EXAMPLES_LLAMA_MODEL_LINEAR_H_
#define EXAMPLES_LLAMA_MODEL_LINEAR_H_

#include <ATen/core/Tensor.h>
#include <ATen/ops/linear.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

namespace llama {

// LibTorch's rounds inputs of more than two dimensions before it adds the bias,
// which in bfloat16 is not what Python's computes.
class LinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;

  // [..., in_features] -> [..., out_features].
  at::Tensor forward(const at::Tensor& x) {
    return at::linear(x, weight, bias);
  }
};
TORCH_MODULE(Linear);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_MODEL_LINEAR_H_
