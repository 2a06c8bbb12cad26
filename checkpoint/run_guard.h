// A training run that guards itself: numbers that are not finite end it before
// they become a part of the model or of a checkpoint, and a signal ends it with
// a checkpoint, after the same step on all ranks.
//
//   const comm::StopRequest stop;  // at the beginning of main()
//   ...
//   checkpoint::RunGuard guard(ranks, checkpoints.get(), &run, options);
//   for (int64_t step = first + 1; step <= steps; ++step) {
//     ... forward and backward; norm = model->ClipGradNorm(1.0);
//     FSDP_ASSIGN_OR_RETURN(
//         const bool is_finite,
//         guard.MayStep(step, loss.item<double>(), norm.item<double>()));
//     if (is_finite) optimizer.step();
//     optimizer.zero_grad();
//     FSDP_RETURN_IF_ERROR(guard.EndStep(step, /*is_last=*/step == steps));
//   }
#ifndef CHECKPOINT_RUN_GUARD_H_
#define CHECKPOINT_RUN_GUARD_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"

namespace fsdp::checkpoint {

// All ranks pass the same, but for functions.
struct RunGuardOptions {
  // A checkpoint is saved after every so many steps, besides the last step and
  // the one after which the run is stopped; 0: only after those.
  int64_t save_every = 0;
  // Whether the training goes on while a checkpoint is written.
  bool save_async = true;
  // So many steps in a row whose numbers are not finite are left out, with a
  // warning; the next one ends the run. 0: the first one does.
  int64_t max_skipped = 0;
  // Called before each save, to note in TrainingRun::entries where the data is;
  // false: nothing is saved, since somebody else does. Null: true.
  std::function<bool(int64_t step)> before_save = nullptr;
  // The signal that tells this rank to stop; 0: none so far. Null: that of
  // comm::StopRequest::Current(), if there is one.
  std::function<int()> signal = nullptr;
};

// Notes in run->entries, and so in its checkpoints, what a run of so many steps
// was asked for: {"--seq", "512"}. Returns lines for whoever goes on from step
// `done`: one for each that is another than in the checkpoint that was loaded,
// "--seq=512: the checkpoint is of a run with --seq=256", and one where there
// is no step left.
std::vector<std::string> NoteFlags(
    const std::map<std::string, std::string>& flags, int64_t done,
    int64_t steps, TrainingRun* run);

// Thread-compatible. Collective: all ranks make the same calls for the same
// steps, and a step costs one all-reduce of two numbers per rank, whose label
// is the step: errors of ranks that have finished say in which step that was.
class RunGuard {
 public:
  // `ranks`: those of the model; null for a process alone. `checkpoints`: null
  // where nothing is saved. Both they and `run` outlive the guard.
  RunGuard(std::shared_ptr<comm::Communicator> ranks, Checkpointer* checkpoints,
           TrainingRun* run,
           const RunGuardOptions& options = RunGuardOptions());

  // To be called between the backward of `step` and the optimizer's step.
  // `loss`: this rank's. `grad_norm`: that of all gradients, as ClipGradNorm()
  // returns it; 0 where there is none, as with a gradient scaler, whose
  // gradients may overflow. False: the step is to be left out. Where
  // max_skipped steps have been: FailedPrecondition, on all ranks alike, which
  // names the step and the first parameter with a value or a gradient that is
  // not finite. The newest checkpoint stays as it is.
  absl::StatusOr<bool> MayStep(int64_t step, double loss, double grad_norm = 0);

  // To be called after the optimizer's step. Saves where that is due, and
  // returns once the last checkpoint, or that of a run that is stopped, is on
  // the disk. A model with a value that is not finite is not saved:
  // FailedPrecondition names the parameter. Once one rank has been told to
  // stop: Cancelled, of which comm::ExitCodeOf() makes 128 + the signal, on all
  // ranks after the same step, unless that was the last one.
  absl::Status EndStep(int64_t step, bool is_last = false);

  // The signal after which the run stops, the same on all ranks; 0: none.
  int signal() const { return signal_; }
  // The mean over the ranks of the losses of the last MayStep().
  double mean_loss() const { return mean_loss_; }

 private:
  absl::Status Exchange(int64_t step, double loss);
  absl::Status NotFiniteError(int64_t step, double grad_norm);
  absl::Status Save(int64_t step, bool waits);

  const std::shared_ptr<comm::Communicator> ranks_;
  Checkpointer* const checkpoints_;
  TrainingRun& run_;
  const RunGuardOptions options_;
  bool has_exchanged_ = false;  // since the last EndStep()
  int signal_ = 0;              // of the first rank that has one
  std::vector<double> losses_;  // by rank
  double mean_loss_ = 0;
  int64_t skipped_ = 0;  // steps in a row
  int64_t saved_ = -1;   // the last step; -1: none by this guard
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_RUN_GUARD_H_
