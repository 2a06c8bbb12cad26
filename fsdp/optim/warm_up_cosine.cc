#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "fsdp/optim/training_step.h"

namespace fsdp {

WarmUpCosine::WarmUpCosine(torch::optim::Optimizer& optimizer,
                           const WarmUpCosineOptions& options)
    : LRScheduler(optimizer), steps_by_(optimizer), options_(options) {
  for (torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    peaks_.push_back(group.options().get_lr());
  }
  SetRates();
}

void WarmUpCosine::SetRates() {
  size_t i = 0;
  for (torch::optim::OptimizerParamGroup& group : steps_by_.param_groups()) {
    group.options().set_lr(peaks_[i++] * At(int64_t{step_count_}, options_));
  }
}

double WarmUpCosine::At(int64_t step, const WarmUpCosineOptions& options) {
  if (step < options.warm_up) {
    return static_cast<double>(step + 1) / static_cast<double>(options.warm_up);
  }
  const auto left = static_cast<double>(
      std::max<int64_t>(options.steps - options.warm_up, 1));
  const double done =
      std::min(static_cast<double>(step - options.warm_up) / left, 1.0);
  const double cosine = 0.5 * (1 + std::cos(std::acos(-1.0) * done));
  return options.floor + (1 - options.floor) * cosine;
}

std::string WarmUpCosine::ToString() const {
  return absl::StrCat("WarmUpCosine: warm_up ", options_.warm_up, ", steps ",
                      options_.steps, ", floor ", options_.floor);
}

// Returns the rates of the next step: step_count_ counts those before this
// call.
std::vector<double> WarmUpCosine::get_lrs() {
  std::vector<double> rates = peaks_;
  for (double& rate : rates) rate *= At(int64_t{step_count_} + 1, options_);
  return rates;
}

}  // namespace fsdp
