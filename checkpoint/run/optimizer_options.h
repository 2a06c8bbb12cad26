// Options of torch::optim's optimizers, and the state of its schedulers, for
// training.json.
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

// Returns {"class": "AdamW", "lr": 0.001, "betas": [0.9, 0.999], ...}, for SGD,
// Adam, AdamW, Adagrad and RMSprop. InvalidArgument: the options are of another
// class, or a number is not finite, which JSON cannot express.
absl::StatusOr<Json> OptionsToJson(
    const torch::optim::OptimizerOptions& options);

// Returns the options, of the class that `json` names. InvalidArgument: the
// class is not known, or members are missing, unexpected or of another type.
absl::StatusOr<std::unique_ptr<torch::optim::OptimizerOptions>> OptionsFromJson(
    const Json& json);

// torch::optim's schedulers have no public access to what follows.

// Returns how often step() was called, which with the optimizer's learning
// rates is all the state of StepLR and of schedulers of a user's own that
// derive from LRScheduler.
int64_t StepsOf(const torch::optim::LRScheduler& scheduler);
// Sets that count, 0 <= `steps` < 2^32. Does not change the learning rates,
// except that a WarmUpCosine sets those of its step.
void SetSteps(torch::optim::LRScheduler& scheduler, int64_t steps);

// Returns the settings of a StepLR or WarmUpCosine, "StepLR: step_size 10,
// gamma 0.1"; empty for other classes.
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
// Does not change the learning rates. All counts fit 32 bits.
void SetState(torch::optim::ReduceLROnPlateauScheduler& scheduler,
              const PlateauState& state);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_RUN_OPTIMIZER_OPTIONS_H_
