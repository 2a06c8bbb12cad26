// How learning rates go from step to step: a warm-up, then half a cosine.
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
  double floor = 0.1;   // what it ends with, as a part of the peak
};

// As torch::optim's schedulers: step() comes after each step of the optimizer,
// and TrainingRun::schedulers saves where it is.
class WarmUpCosine final : public torch::optim::LRScheduler {
 public:
  // What groups have now is the peak of each; they get what the first step has.
  WarmUpCosine(torch::optim::Optimizer& optimizer,
               const WarmUpCosineOptions& options);

  // Gives the groups what the next step has. Loading a checkpoint calls it, as
  // the optimizer's rates are then those of the run that was saved.
  void SetRates();

  // What step `step`, from 0, has of the peak: linear from 1 / warm_up to 1,
  // which the first step after the warm-up has, too, then half a cosine to
  // `floor` behind the last one.
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
