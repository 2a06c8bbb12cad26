// Options of torch::optim's optimizers as JSON.
#ifndef CHECKPOINT_RUN_OPTIMIZER_OPTIONS_H_
#define CHECKPOINT_RUN_OPTIMIZER_OPTIONS_H_

#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/json.h"

namespace fsdp::checkpoint {

// {"class": "AdamW", "lr": 0.001, "betas": [0.9, 0.999], ...}, for SGD, Adam,
// AdamW, Adagrad and RMSprop. InvalidArgument: of another class, or a number
// that is not finite, which JSON cannot say.
absl::StatusOr<Json> OptionsToJson(
    const torch::optim::OptimizerOptions& options);

// The options, of the class that `json` names. InvalidArgument: a class that is
// not known, or members that are missing, unexpected or of another type.
absl::StatusOr<std::unique_ptr<torch::optim::OptimizerOptions>> OptionsFromJson(
    const Json& json);

// What torch::optim's schedulers of learning rates remember, which they show to
// nobody.

// How often step() was called: all that StepLR and schedulers of a user's own
// that derive from LRScheduler go by, besides the optimizer's learning rates.
int64_t StepsOf(const torch::optim::LRScheduler& scheduler);
// Leaves the learning rates alone. `steps` >= 0, of 32 bits.
void SetSteps(torch::optim::LRScheduler& scheduler, int64_t steps);

// "StepLR: step_size 10, gamma 0.1": what LibTorch or this library's class has
// got from its constructor. Empty for other classes.
std::string SettingsOf(const torch::optim::LRScheduler& scheduler);

struct PlateauState {
  float best = 0;  // may be infinite
  int64_t last_epoch = 0;
  int64_t bad_epochs = 0;
  int64_t cooldown = 0;

  friend bool operator==(const PlateauState& a, const PlateauState& b) {
    return a.best == b.best && a.last_epoch == b.last_epoch &&
           a.bad_epochs == b.bad_epochs && a.cooldown == b.cooldown;
  }
};

PlateauState StateOf(const torch::optim::ReduceLROnPlateauScheduler& scheduler);
// Leaves the learning rates alone. Counts of 32 bits.
void SetState(torch::optim::ReduceLROnPlateauScheduler& scheduler,
              const PlateauState& state);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_RUN_OPTIMIZER_OPTIONS_H_
