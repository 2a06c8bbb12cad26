// Checkpoints of training runs, whose model files are a Hugging Face model.
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
// "/runs/7b/step-100" then has model.safetensors (or several, and an index),
// optimizer/exp_avg.safetensors and so on, training.json, ranks/, and
// manifest.json, which has the size and the CRC32C of each MiB of all others.
// The files do not depend on the number of ranks, and any number, with any
// strategy and wrap policy, loads them. A folder step-N is whole or not there,
// whatever is killed when; with CommitBy::kManifest, one that has a manifest is
// whole.
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
#include "checkpoint/commit/commit_by.h"
#include "checkpoint/run/run.h"
#include "checkpoint/save/save_layout.h"
#include "comm/communicator.h"

namespace fsdp::checkpoint {

class FileSystem;

// All ranks pass the same.
struct CheckpointerOptions {
  // Checkpoints that are kept: the newest ones, and those of steps that are
  // multiples of keep_every. The newest, and the one that was loaded, stay.
  std::optional<int64_t> keep_last = std::nullopt;  // unset: all
  std::optional<int64_t> keep_every = std::nullopt;
  // The dtype that floating-point parameters and buffers have in the files;
  // unset: their own.
  std::optional<c10::ScalarType> model_dtype = std::nullopt;
  // Replace a checkpoint of the same step; it stays until the new one is there.
  bool overwrite = false;
  // Without random writes: kPerRank. Any layout loads at any number of ranks;
  // `checkpoint consolidate` makes a Hugging Face model of files of ranks.
  SaveLayout layout = SaveLayout::kShared;
  // Where folders cannot be renamed: kManifest, with kPerRank and without
  // `overwrite`. Ranks of an earlier run have to have ended.
  CommitBy commit_by = CommitBy::kRename;
  int64_t max_file_bytes = 5'000'000'000;  // of kShared
  // Says which parameters and buffers are saved, by name; null: all. Those that
  // are not, such as the base of adapters, keep the values that they have when
  // a checkpoint is loaded.
  std::function<bool(const std::string& name)> saves = nullptr;
  // Further small files beside the model's, by name: {"config.json", ...}.
  std::map<std::string, std::string> texts = {};

  // Memory for copies of values that are still to be written by SaveAsync(), at
  // most, on each rank. 0: it returns when all is written.
  int64_t staging_bytes = int64_t{4} << 30;
  // Gets the bytes of this rank that are on their way to the disk, and all that
  // the save under way writes. Called by the thread that writes them, which is
  // another one in a SaveAsync(). May be null.
  std::function<void(int64_t done, int64_t all)> progress = nullptr;
  // Each rank writes no faster; unset: as fast as the disk.
  std::optional<int64_t> bytes_per_second = std::nullopt;
  // Limits each wait for an answer of other ranks, who give one every second
  // while they save, however long that takes, and that of SaveAsync() for room
  // for copies.
  // After a wait for ranks that was too long, saves and loads fail until the
  // checkpointer is opened again.
  absl::Duration timeout = absl::Minutes(30);
  // A save fails, on all ranks, by DeadlineExceeded that names the rank, when
  // no call of a rank to its disk has come back for so long. Nobody waits for
  // that disk any longer but a Save() of its own rank. The next saves fail,
  // too, by Unavailable, until it has answered; the training may go on.
  absl::Duration stall_timeout = absl::Minutes(30);
  // Null: the machine's. Outlives the checkpointer.
  FileSystem* files = nullptr;
};

struct LoadRunOptions {
  // Refuse names that are missing in the files or in the model.
  bool strict = true;
  // Gets the bytes that this rank has read, and all that it has to. May be
  // null.
  std::function<void(int64_t done, int64_t all)> progress = nullptr;
};

// A folder of checkpoints, used by one run at a time. All ranks make the same
// calls, between steps, from one thread; what one rank cannot do all return as
// an error, "rank 2: " in front. Between ranks only these go: a save's and a
// load's agreement that all is well, and how far a save is.
class Checkpointer {
 public:
  // Makes the folder where there is none; its parent has to exist. Removes what
  // killed runs have left half written. `ranks`: those of the model; null
  // without. Collective. FailedPrecondition: a folder that has other things in
  // it, or that another run uses. InvalidArgument: options that cannot be, or
  // differ between ranks in how checkpoints are committed.
  static absl::StatusOr<std::unique_ptr<Checkpointer>> Open(
      const std::string& folder,
      const std::shared_ptr<comm::Communicator>& ranks,
      const CheckpointerOptions& options = CheckpointerOptions());
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;
  // Waits for a save under way; its error is a warning then.
  ~Checkpointer();

  // When it returns, the checkpoint of `step` is on the disk, or, after an
  // error, all is as before, unless the text says that the step is saved: older
  // ones could not be removed then. AlreadyExists: there is one of that step,
  // or, in the first save of a run that has loaded none, of a later one.
  absl::Status Save(int64_t step, const TrainingRun& run);

  // Returns when the values are copied, which may change from then on; a thread
  // writes them. Waits for an earlier save first: one is under way at a time,
  // and its error is returned here, before anything is begun.
  absl::Status SaveAsync(int64_t step, const TrainingRun& run);
  // Until the save under way, if any, has ended; its error, once.
  absl::Status Wait();

  const std::string& folder() const;

  // The steps that can be loaded, rising. Not collective.
  absl::StatusOr<std::vector<int64_t>> Steps() const;

  // Loads the newest checkpoint: its step, or none where there is none. See
  // Load().
  absl::StatusOr<std::optional<int64_t>> LoadLatest(
      TrainingRun& run, const LoadRunOptions& options = LoadRunOptions());
  // Fills the model, the optimizer and the rest of `run`. What belongs to a
  // rank, random states above all, comes back where the number of ranks is as
  // it was. Every byte is held against its checksum. NotFound: no such step.
  // InvalidArgument, with nothing changed, lists all that does not fit.
  // DataLoss, naming the file and its bytes: damaged; the model and the
  // optimizer may be filled in part. Collective.
  absl::Status Load(int64_t step, TrainingRun& run,
                    const LoadRunOptions& options = LoadRunOptions());

 private:
  class Impl;
  explicit Checkpointer(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

// How far a run has got, for whoever watches it.

// The step that Checkpointer::LoadLatest() would load from `folder`; none where
// there is no checkpoint, or no folder. Reads names, and a manifest where
// checkpoints are committed by them, from any process, also while a run saves;
// needs no LibTorch.
absl::StatusOr<std::optional<int64_t>> NewestStep(const std::string& folder);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_CHECKPOINTER_H_
