// The model of the benchmarks of training steps, and its optimizer.
#ifndef BENCHMARKS_RESIDUAL_MLP_H_
#define BENCHMARKS_RESIDUAL_MLP_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <vector>

namespace fsdp {

// Of 2.1 million parameters.
class ResidualBlockImpl : public torch::nn::Module {
 public:
  static constexpr int64_t kDim = 512;

  ResidualBlockImpl();
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear fc, out;
};

class ResidualMlpImpl : public torch::nn::Module {
 public:
  static constexpr int64_t kDim = ResidualBlockImpl::kDim;
  static constexpr int kBlocks = 8;

  ResidualMlpImpl();
  at::Tensor forward(const at::Tensor& x);

  torch::nn::ModuleList blocks;
  torch::nn::Linear head;
};

at::Tensor ReconstructionLoss(const at::Tensor& output, const at::Tensor& x);

// Fused AdamW over the tensors given; Step() drops their gradients.
class FusedAdamW {
 public:
  explicit FusedAdamW(std::vector<at::Tensor> parameters);
  void Step();

 private:
  std::vector<at::Tensor> parameters_, means_, squares_, steps_;
};

}  // namespace fsdp

#endif  // BENCHMARKS_RESIDUAL_MLP_H_
