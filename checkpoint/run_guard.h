// A training run that guards itself: it ends when numbers are not finite,
// before these become a part of the model or of a checkpoint, and on a signal,
// with a checkpoint, after the same step on all ranks.
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

// Options of a RunGuard. All ranks pass the same, except for the functions.
struct RunGuardOptions {
  // A checkpoint is saved after every `save_every` steps (0: none of these),
  // after the last step, and after the step at which the run is stopped.
  int64_t save_every = 0;
  // If true, the training goes on while a checkpoint is written.
  bool save_async = true;
  // Up to so many steps in a row whose numbers are not finite are left out,
  // with a warning; the next one ends the run.
  int64_t max_skipped = 0;
  // Called before each save, for example to note the position in the data in
  // TrainingRun::entries. If it returns false, nothing is saved, because
  // somebody else saves. May be null.
  std::function<bool(int64_t step)> before_save = nullptr;
  // Returns the signal that tells this rank to stop, or 0. If null,
  // comm::StopRequest::Current() is asked, if there is one.
  std::function<int()> signal = nullptr;
};

// Notes in run->entries, and so in its checkpoints, the flags of a run of
// `steps` steps: {"--seq", "512"}. Returns lines to show to whoever goes on
// from step `done`: one for each flag whose value differs from the loaded
// checkpoint's, "--seq=512: the checkpoint is of a run with --seq=256", and one
// if no step is left.
std::vector<std::string> NoteFlags(
    const std::map<std::string, std::string>& flags, int64_t done,
    int64_t steps, TrainingRun* run);

// Saves and ends a run, as its options say. Collective and thread-compatible:
// all ranks make the same calls for the same steps. A step costs one all-reduce
// of two numbers per rank. Its label is the step, so that errors of ranks that
// have finished say in which step that was.
class RunGuard {
 public:
  // `ranks` are the model's, null for a process alone. `checkpoints` is null if
  // nothing is saved. `checkpoints` and `run` outlive the guard.
  RunGuard(std::shared_ptr<comm::Communicator> ranks, Checkpointer* checkpoints,
           TrainingRun* run,
           const RunGuardOptions& options = RunGuardOptions());

  // Call this between the backward of `step` and the optimizer's step. Returns
  // true if the optimizer may step, false if the step is to be left out. `loss`
  // is this rank's. `grad_norm` is that of all gradients, as ClipGradNorm()
  // returns it; pass 0 if there is none, as with a gradient scaler, whose
  // gradients may overflow. After `max_skipped` such steps in a row:
  // FailedPrecondition on all ranks, naming the step and the first parameter
  // whose value or gradient is not finite. The newest checkpoint stays.
  absl::StatusOr<bool> MayStep(int64_t step, double loss, double grad_norm = 0);

  // Call this after the optimizer's step. Saves if a save is due; the last
  // checkpoint, and that of a run that is stopped, are on the disk when it
  // returns. A model with a value that is not finite is not saved:
  // FailedPrecondition names the parameter. Once one rank has been told to
  // stop, all return Cancelled after the same step, unless that was the last
  // one; comm::ExitCodeOf() turns this error into 128 + the signal.
  absl::Status EndStep(int64_t step, bool is_last = false);

  // The signal that stops the run, the same on all ranks; 0 if there is none.
  int signal() const { return signal_; }
  // The mean over all ranks of the losses of the last MayStep().
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
  int signal_ = 0;              // the lowest rank's that has one
  std::vector<double> losses_;  // by rank
  double mean_loss_ = 0;
  int64_t skipped_ = 0;  // steps in a row
  int64_t saved_ = -1;   // the last step this guard has saved; -1: none
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_RUN_GUARD_H_
