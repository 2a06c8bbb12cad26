// Saves and loads checkpoints of training runs. The model files of a checkpoint
// are a Hugging Face model.
//
//   auto checkpoints = fsdp::ValueOrThrow(fsdp::checkpoint::Checkpointer::Open(
//       "/runs/7b", ranks));
//   fsdp::checkpoint::TrainingRun run;
//   run.model = model.get();            // sharded or not
//   run.optimizer = &optimizer;
//   auto step = fsdp::ValueOrThrow(checkpoints->LoadLatest(run)).value_or(0);
//   while (...) {
//     ...
//     if (++step % 100 == 0) status = checkpoints->SaveAsync(step, run);
//   }
//   status = checkpoints->Wait();
//
// "/runs/7b/step-100" then has model.safetensors (or several files and an
// index), optimizer/exp_avg.safetensors and so on, training.json, ranks/, and
// manifest.json, which has the size of every other file and the CRC32C of each
// of its MiB. The files do not depend on the number of ranks: any number, with
// any strategy and wrap policy, loads them. Whatever is killed when, a folder
// step-N is whole or absent; with CommitBy::kManifest, one that has a manifest
// is whole.
#ifndef CHECKPOINT_CHECKPOINTER_H_
#define CHECKPOINT_CHECKPOINTER_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/commit/save_layout.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"

namespace fsdp {
class FileSystem;
}  // namespace fsdp

namespace fsdp::checkpoint {

// Options of a Checkpointer. All ranks pass the same.
struct CheckpointerOptions {
  // The checkpoints that are kept: the `keep_last` newest (unset: all), those
  // of multiples of `keep_every`, and always the newest and the one that was
  // loaded.
  std::optional<int64_t> keep_last = std::nullopt;
  std::optional<int64_t> keep_every = std::nullopt;
  // The dtype of floating-point parameters and buffers in the files; unset:
  // their own.
  std::optional<c10::ScalarType> model_dtype = std::nullopt;
  // If true, a save replaces a checkpoint of the same step, which stays until
  // the new one is complete.
  bool overwrite = false;
  // Storage without random writes needs kPerRank. Either layout loads at any
  // number of ranks; `checkpoint consolidate` turns files of ranks into a
  // Hugging Face model.
  SaveLayout layout = SaveLayout::kShared;
  // Storage that cannot rename folders needs kManifest, together with kPerRank
  // and without `overwrite`. All ranks of an earlier run must have ended.
  CommitBy commit_by = CommitBy::kRename;
  int64_t max_file_bytes = 5'000'000'000;  // per file, with kShared
  // Returns whether the parameter or buffer of this name is saved; null: all
  // are. Others, such as the base of adapters, keep their values when a
  // checkpoint is loaded.
  std::function<bool(const std::string& name)> saves = nullptr;
  // Small files that rank 0 writes beside the model's, by name:
  // {"config.json", ...}. Those of other ranks do not count.
  std::map<std::string, std::string> texts = {};

  // The most memory per rank for copies of values that SaveAsync() has still to
  // write. If it is 0, SaveAsync() writes before it returns.
  int64_t staging_bytes = int64_t{4} << 30;
  // Called with the bytes of this rank that are on their way to the disk, and
  // all that it writes in the save, by the thread that writes, which in
  // SaveAsync() is not the caller's. May be null.
  std::function<void(int64_t done, int64_t all)> progress = nullptr;
  // Limits each wait for an answer of other ranks, and each wait of SaveAsync()
  // for room for copies. Ranks that save answer every second, however long the
  // save takes. When a wait for ranks has timed out, saves and loads fail until
  // the checkpointer is opened again.
  absl::Duration timeout = absl::Minutes(30);
  // When no call of a rank to its disk has returned for so long, the save fails
  // on all ranks by DeadlineExceeded, naming the rank. Only a Save() of that
  // rank still waits for its disk. Until the disk has answered, the next saves
  // fail by Unavailable; the training may go on.
  absl::Duration stall_timeout = absl::Minutes(30);
  // If null, the machine's file system. Outlives the checkpointer.
  FileSystem* files = nullptr;
};

// Options of Checkpointer::Load(); all ranks pass the same `strict`.
struct LoadRunOptions {
  // If true, names that the files or the model lack are refused.
  bool strict = true;
  // Called with the bytes that this rank has read, and all that it has to read.
  // May be null.
  std::function<void(int64_t done, int64_t all)> progress = nullptr;
};

// A folder of checkpoints, which one run uses at a time. All ranks make the
// same calls, from one thread each, between steps. If one rank fails, all
// return its error, "rank 2: " in front. Ranks tell each other that a save or a
// load goes well and how far a save is, and exchange values only of parameters
// whose storage is not row-major.
class Checkpointer {
 public:
  // Opens `folder`, or makes it in its parent, and removes what killed runs
  // have left half written. Collective over `ranks`, the model's; null: one
  // process alone. FailedPrecondition: the folder has other things in it, or
  // another run uses it. InvalidArgument: options contradict each other, or
  // `commit_by` differs between ranks.
  static absl::StatusOr<std::unique_ptr<Checkpointer>> Open(
      const std::string& folder,
      const std::shared_ptr<comm::Communicator>& ranks,
      const CheckpointerOptions& options = CheckpointerOptions());
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;
  // Waits for a save under way, and logs its error as a warning.
  virtual ~Checkpointer() = default;

  // Saves `run` as the checkpoint of `step` and returns when it is on the disk.
  // After an error all is as before, unless the text says that the step is
  // saved, or may be. Older ones that cannot be removed are only a warning, and
  // are tried again later. AlreadyExists: there is a checkpoint of that step
  // or, in the first save of a run that has loaded none, of a later one.
  virtual absl::Status Save(int64_t step, const TrainingRun& run) = 0;

  // Returns when the values are copied, so that they may change; a thread
  // writes them. One save is under way at a time: this call first waits for an
  // earlier one, and returns its error before it begins anything.
  virtual absl::Status SaveAsync(int64_t step, const TrainingRun& run) = 0;
  // Waits until the save under way, if any, has ended. Returns its error once.
  virtual absl::Status Wait() = 0;

  // The folder as Open() got it.
  virtual const std::string& folder() const = 0;

  // Returns the steps that can be loaded, rising. Not collective.
  virtual absl::StatusOr<std::vector<int64_t>> Steps() const = 0;

  // Loads the newest checkpoint, as Load() does, and returns its step, or
  // nothing if there is no checkpoint.
  virtual absl::StatusOr<std::optional<int64_t>> LoadLatest(
      TrainingRun& run, const LoadRunOptions& options) = 0;
  absl::StatusOr<std::optional<int64_t>> LoadLatest(TrainingRun& run) {
    return LoadLatest(run, LoadRunOptions());
  }
  // Fills the model, the optimizer and the rest of `run`. Collective. The
  // values of single ranks, above all random states, come back only if the
  // number of ranks is the same. Every byte is checked against its checksum.
  // NotFound: there is no such step. InvalidArgument, with nothing changed,
  // lists all that does not fit. DataLoss names the damaged file and bytes; the
  // model and the optimizer may be partly filled then.
  virtual absl::Status Load(int64_t step, TrainingRun& run,
                            const LoadRunOptions& options) = 0;
  absl::Status Load(int64_t step, TrainingRun& run) {
    return Load(step, run, LoadRunOptions());
  }

 protected:
  Checkpointer() = default;
};

// Returns the step that Checkpointer::LoadLatest() would load from `folder`, or
// nothing if there is no checkpoint or no folder. Reads names, and manifests
// where checkpoints are committed by them. Any process may call it to watch a
// run, also while that saves.
absl::StatusOr<std::optional<int64_t>> NewestStep(const std::string& folder);

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
//     FSDP_RETURN_IF_ERROR(guard.EndStep(step, step == steps));
//   }
//
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

#endif  // CHECKPOINT_CHECKPOINTER_H_
