// The model of the benchmarks of training steps.
#ifndef BENCHMARKS_RESIDUAL_MLP_H_
#define BENCHMARKS_RESIDUAL_MLP_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>

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

}  // namespace fsdp

#endif  // BENCHMARKS_RESIDUAL_MLP_H_
