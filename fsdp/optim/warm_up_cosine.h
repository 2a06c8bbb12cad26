// A schedule of learning rates: a warm-up, then half a cosine.
#ifndef FSDP_OPTIM_WARM_UP_COSINE_H_
#define FSDP_OPTIM_WARM_UP_COSINE_H_

#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp {

struct WarmUpCosineOptions {
  int64_t warm_up = 0;  // steps
  int64_t steps = 1;    // of the whole run, warm-up included
  double floor = 0.1;   // the last rate, as a part of the peak
};

// Works as torch::optim's schedulers do: call step() after each step of the
// optimizer. TrainingRun::schedulers saves its state.
class WarmUpCosine final : public torch::optim::LRScheduler {
 public:
  // Takes the present rate of each group as its peak, and sets the rates of the
  // first step.
  WarmUpCosine(torch::optim::Optimizer& optimizer,
               const WarmUpCosineOptions& options);

  // Sets the rates of the next step. Loading a checkpoint calls it, since the
  // optimizer has the saved run's rates then.
  void SetRates();

  // Returns the rate of step `step`, counted from 0, as a part of the peak. It
  // rises linearly from 1 / warm_up to 1, stays there for the first step after
  // the warm-up, and falls by half a cosine to `floor` after the last step.
  static double At(int64_t step, const WarmUpCosineOptions& options);

  std::string ToString() const;

 private:
  std::vector<double> get_lrs() override;

  torch::optim::Optimizer& steps_by_;
  const WarmUpCosineOptions options_;
  std::vector<double> peaks_;  // of groups
};

}  // namespace fsdp

#endif  // FSDP_OPTIM_WARM_UP_COSINE_H_
