// All of a run that is not a tensor, as JSON text, which training.json holds.
#ifndef CHECKPOINT_RUN_TRAINING_JSON_H_
#define CHECKPOINT_RUN_TRAINING_JSON_H_

#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/json.h"
#include "checkpoint/run/run.h"
#include "fsdp/optim/training_step.h"
#include "fsdp/state/optimizer_values.h"

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

inline constexpr char kTrainingName[] = "training.json";

struct TrainingRecord {
  int64_t step = 0;
  int world_size = 1;
  // Nothing if there is no optimizer.
  std::optional<std::vector<OptimizerGroup>> groups;
  std::vector<std::string> slots;  // names of the tensors of its states
  // The numbers of its states, by parameter: {"weight": {"step": 7}}.
  std::map<std::string, std::map<std::string, int64_t>> numbers;
  std::vector<int64_t> scheduler_steps;
  std::vector<std::string> scheduler_settings;
  std::vector<PlateauState> plateaus;
  std::optional<GradScalerState> scaler;
  // True if the average of the weights has begun; unset if there is none.
  std::optional<bool> average;
  std::map<std::string, std::string> entries;
};

// Returns the state of `run`. `optimizer` has its values, or is null.
TrainingRecord RecordOf(const TrainingRun& run,
                        const OptimizerValues* optimizer, int64_t step,
                        int world_size);

// InvalidArgument: an entry is not UTF-8, the scaler's scale is not finite, or
// the optimizer's options are of an unknown class.
absl::StatusOr<std::string> ToText(const TrainingRecord& record);
// InvalidArgument names what is missing, unexpected or of another type.
absl::StatusOr<TrainingRecord> ParseTraining(absl::string_view text);

// Changes nothing. InvalidArgument: `run` has a scaler, an average or an
// optimizer that the saved run lacked, or other numbers of schedulers.
absl::Status CheckFits(const TrainingRecord& record, const TrainingRun& run);
// Warns if schedulers have other settings than those of the saved run.
void WarnOfSettings(const TrainingRecord& record, const TrainingRun& run);
// Restores schedulers, scaler and entries from a record that fits `run`, and
// forgets an average that had not begun.
absl::Status Restore(const TrainingRecord& record, TrainingRun& run);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_RUN_TRAINING_JSON_H_
