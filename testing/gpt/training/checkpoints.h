// Where the model of a run goes: checkpoints to go on from, and the trained
// model for others.
#ifndef TESTING_GPT_TRAINING_CHECKPOINTS_H_
#define TESTING_GPT_TRAINING_CHECKPOINTS_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/checkpointer.h"
#include "comm/communicator.h"
#include "testing/gpt/flags/options.h"
#include "testing/gpt/model/trainable_model.h"

namespace gpt {

// Returns the text of config.json, which lies beside the weights: the model's
// sizes under the names that transformers has for them.
std::string ConfigJson(const GptConfig& config);

// Refuses what CheckOptions() cannot know: models that differ between ranks
// and, without --resume, a folder that has checkpoints. Null without --save.
// Collective.
absl::StatusOr<std::unique_ptr<fsdp::checkpoint::Checkpointer>> OpenCheckpoints(
    const TrainOptions& options,
    const std::shared_ptr<fsdp::comm::Communicator>& communicator);

// Returns what would keep ExportTrained() from writing --export, as far as that
// is known before the training. Not collective.
absl::Status CheckExport(const TrainOptions& options, int world_size);

// Writes the folder --export. Collective.
absl::Status ExportTrained(const TrainOptions& options, TrainableModel& model,
                           fsdp::comm::Communicator& communicator);

}  // namespace gpt

#endif  // TESTING_GPT_TRAINING_CHECKPOINTS_H_
