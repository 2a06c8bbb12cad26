// AdamW by torch's fused kernel, which torch::optim does not offer in C++. The
// optimizer of https://arxiv.org/abs/1711.05101, as torch.optim.AdamW(fused=
// True).
#ifndef EXAMPLES_GPT_FUSED_ADAMW_H_
#define EXAMPLES_GPT_FUSED_ADAMW_H_

#include <ATen/core/Tensor.h>

#include <vector>

namespace gpt {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
};

// Works on leaves: parameters or shards of them, empty ones included.
// Thread-compatible.
class FusedAdamW {
 public:
  FusedAdamW(const std::vector<at::Tensor>& parameters, AdamWOptions options);

  // Updates every parameter that has a gradient, in place.
  void Step();
  // Drops the gradients.
  void ZeroGrad();

 private:
  // Allocated at a parameter's first gradient.
  struct State {
    at::Tensor parameter;
    at::Tensor exp_avg;
    at::Tensor exp_avg_sq;
    at::Tensor step;
  };

  const AdamWOptions options_;
  std::vector<State> states_;
};

}  // namespace gpt

#endif  // EXAMPLES_GPT_FUSED_ADAMW_H_
