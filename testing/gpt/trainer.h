// The training loop.
#ifndef TESTING_GPT_TRAINER_H_
#define TESTING_GPT_TRAINER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"
#include "replicas/replicas.h"
#include "testing/gpt/batches.h"
#include "testing/gpt/options.h"
#include "testing/gpt/trainable_model.h"

namespace gpt {

// For one of several replicas; not on a device.
struct ReplicaHooks {
  int number = 0;  // which one this is
  // Joins the others in a run of `steps`, of which `done` are in `run`. Empty
  // if there are no replicas.
  std::function<absl::StatusOr<std::unique_ptr<fsdp::Replicas>>(
      fsdp::checkpoint::TrainingRun* run, int64_t steps, int64_t done)>
      join;
  // `members`, as of Members(), were the first to finish `step`, from 1.
  std::function<void(int64_t step, const std::string& members)> on_members;
};

// A training takes these besides its options. Functions may be empty.
struct TrainerContext {
  // Gets and gives the checkpoints; null: there are none. Among replicas the
  // first one saves, and each that is stopped.
  fsdp::checkpoint::Checkpointer* checkpoints = nullptr;
  // Returns the signal that tells this rank to stop, 0 if none has. All ranks
  // stop after the same step once one has it.
  std::function<int()> signal;
  // The checkpoint of `step` was loaded; `odd` are lines of NoteFlags().
  std::function<void(int64_t step, const std::vector<std::string>& odd)>
      on_resumed;
  // Is called when `step`, from 1, is done; its loss is the mean over the
  // ranks. On a device the next step has been given to it by then.
  std::function<void(int64_t step, double loss)> on_step;
  // Called before the first timed step.
  std::function<void()> on_timed_begin;
  ReplicaHooks replica;
};

// Lists have the steps that were left, warm-up included, unless they say
// otherwise.
struct TrainingResult {
  std::vector<double> mean_losses;   // over the ranks, by step
  std::vector<double> own_losses;    // of this rank
  std::vector<double> step_seconds;  // of the timed steps
  absl::Status stopped;   // by StoppedError(), before all steps were done
  int64_t last_step = 0;  // the last one that is done, of all
  // The model has gone through all steps, in this run or before; false if they
  // were done without this replica.
  bool finished = false;
};

// Is constant.
inline constexpr double kLearningRate = 3e-4;

// Trains by AdamW with torch's defaults and kLearningRate. A step is timed from
// its batch, or the end of the step before where that is later, to its end on
// this rank. On a device the host is a step ahead, so that no step waits for
// it: when the ranks are to stop, they stop a step later, and a loss that is
// not finite ends the run after the optimizer's step instead of before it.
// Neither is saved (checkpoint/checkpointer.h). All ranks return alike, except
// that errors name what failed on each. With checkpoints the last step is
// saved, also one after which the ranks were to stop, before Train() returns;
// what saving takes between two steps is no part of either.
absl::StatusOr<TrainingResult> Train(
    const TrainOptions& options, const TrainerContext& context,
    TrainableModel& model, Batches& data,
    const std::shared_ptr<fsdp::comm::Communicator>& ranks);

}  // namespace gpt

#endif  // TESTING_GPT_TRAINER_H_
