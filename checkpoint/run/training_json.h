// All of a run that is not a tensor, as JSON text, which training.json holds.
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
#include "fsdp/optim/training_step.h"
#include "fsdp/state/optimizer_values.h"

namespace fsdp::checkpoint {

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
  bool has_average = false;  // of the weights
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
// Restores schedulers, scaler and entries from a record that fits `run`.
absl::Status Restore(const TrainingRecord& record, TrainingRun& run);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_RUN_TRAINING_JSON_H_
