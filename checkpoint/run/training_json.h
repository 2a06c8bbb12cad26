// All of a run that is no tensor, as JSON text: what training.json holds.
#ifndef CHECKPOINT_RUN_TRAINING_JSON_H_
#define CHECKPOINT_RUN_TRAINING_JSON_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/run/optimizer_options.h"
#include "checkpoint/run/run.h"
#include "fsdp/optim/grad_scaler.h"
#include "fsdp/state/optimizer_values.h"

namespace fsdp::checkpoint {

inline constexpr char kTrainingName[] = "training.json";

struct TrainingRecord {
  int64_t step = 0;
  int world_size = 1;
  // Without an optimizer: nothing.
  std::optional<std::vector<OptimizerGroup>> groups;
  std::vector<std::string> slots;  // names of tensors of its states
  // Numbers of its states, by parameter: {"weight": {"step": 7}}.
  std::map<std::string, std::map<std::string, int64_t>> numbers;
  std::vector<int64_t> scheduler_steps;
  std::vector<std::string> scheduler_settings;
  std::vector<PlateauState> plateaus;
  std::optional<GradScalerState> scaler;
  bool has_average = false;  // of the weights
  std::map<std::string, std::string> entries;
};

// What `run` is now. `optimizer`: its values, null without one.
TrainingRecord RecordOf(const TrainingRun& run,
                        const OptimizerValues* optimizer, int64_t step,
                        int world_size);

// InvalidArgument: options of an optimizer that are not known.
absl::StatusOr<std::string> ToText(const TrainingRecord& record);
// InvalidArgument, naming what is missing, unexpected or of another type.
absl::StatusOr<TrainingRecord> ParseTraining(absl::string_view text);

// InvalidArgument, with nothing changed: `run` has a scaler, an average,
// an optimizer or other numbers of schedulers than the run that was saved.
absl::Status CheckFits(const TrainingRecord& record, const TrainingRun& run);
// Warns where schedulers are made otherwise than they were when it was saved.
void WarnOfSettings(const TrainingRecord& record, const TrainingRun& run);
// Schedulers, scaler and entries; of a record that fits.
absl::Status Restore(const TrainingRecord& record, TrainingRun& run);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_RUN_TRAINING_JSON_H_
