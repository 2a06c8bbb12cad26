// A model whose parameters are of every kind that files have to get right.
#ifndef CHECKPOINT_TESTS_ODD_NET_H_
#define CHECKPOINT_TESTS_ODD_NET_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>

#include <cstdint>

#include "fsdp/options/options.h"

namespace fsdp::checkpoint::testing {

// A channels_last weight, a transposed one, one without dimensions, an empty
// one, a frozen one, one that never has a gradient, one for no optimizer
// ("left_out") and one that is not sharded ("ignored"); buffers of two dtypes
// that each rank's data decide; and units.
class OddNetImpl : public torch::nn::Module {
 public:
  static constexpr int64_t kColumns = 12;

  explicit OddNetImpl(int seed);
  // [rows, kColumns] to [rows, kWidth].
  at::Tensor forward(const at::Tensor& x);

 private:
  static constexpr int64_t kWidth = 7;

  torch::nn::Conv2d conv_;
  at::Tensor turned_;
  at::Tensor scale_;
  at::Tensor empty_;
  at::Tensor frozen_;
  at::Tensor unused_;
  at::Tensor left_out_;
  at::Tensor ignored_;
  at::Tensor mean_;
  at::Tensor count_;
  torch::nn::ModuleList blocks_;
};

// `options` for it.
void IgnoreWhatIsIgnored(Options& options);

}  // namespace fsdp::checkpoint::testing

#endif  // CHECKPOINT_TESTS_ODD_NET_H_
