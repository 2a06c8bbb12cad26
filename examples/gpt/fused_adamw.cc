#include "examples/gpt/fused_adamw.h"

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <vector>

namespace gpt {

FusedAdamW::FusedAdamW(const std::vector<at::Tensor>& parameters,
                       AdamWOptions options)
    : options_(options) {
  for (const at::Tensor& parameter : parameters) {
    states_.push_back({parameter, {}, {}, {}});
  }
}

void FusedAdamW::Step() {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> parameters, gradients, averages, squares, steps;
  for (State& state : states_) {
    const at::Tensor& gradient = state.parameter.grad();
    if (!gradient.defined() || state.parameter.numel() == 0) continue;
    if (!state.step.defined()) {
      state.exp_avg = at::zeros_like(state.parameter);
      state.exp_avg_sq = at::zeros_like(state.parameter);
      state.step = at::zeros({}, at::kFloat);
    }
    parameters.push_back(state.parameter);
    gradients.push_back(gradient);
    averages.push_back(state.exp_avg);
    squares.push_back(state.exp_avg_sq);
    steps.push_back(state.step.add_(1));
  }
  if (parameters.empty()) return;
  at::_fused_adamw_(parameters, gradients, averages, squares,
                    /*max_exp_avg_sqs=*/{}, steps, options_.lr, options_.beta1,
                    options_.beta2, options_.weight_decay, options_.eps,
                    /*amsgrad=*/false, /*maximize=*/false);
}

void FusedAdamW::ZeroGrad() {
  for (State& state : states_) state.parameter.mutable_grad().reset();
}

}  // namespace gpt
