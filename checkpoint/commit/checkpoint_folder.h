// The folder of a run's checkpoints, which either exist whole or not at all.
#ifndef CHECKPOINT_COMMIT_CHECKPOINT_FOLDER_H_
#define CHECKPOINT_COMMIT_CHECKPOINT_FOLDER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/commit_by.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint {

// Rank 0 has it. The other ranks write into WrittenPath(root, step, token,
// commit_by), which whoever comes first makes, after Claim() and, for a step
// that was given up, after Discard(); and before Commit(). By manifest: after
// Begin(), which removes what is there. At every
// instant, whatever is killed, ListCheckpoints() has what was committed last.
// Errors are those of FileSystem where none is named. Thread-compatible.
class CheckpointFolder {
 public:
  // Makes the folder, in one that has to exist, or takes one that is ours, or
  // empty, and removes what dead runs have left half done. FailedPrecondition
  // for a folder with other things in it, and, unless it is by manifest, while
  // another run has it, which the text names.
  static absl::StatusOr<std::unique_ptr<CheckpointFolder>> Claim(
      FileSystem& files, const std::string& root,
      CommitBy commit_by = CommitBy::kRename);
  CheckpointFolder(const CheckpointFolder&) = delete;
  CheckpointFolder& operator=(const CheckpointFolder&) = delete;
  // Another run may have it then.
  ~CheckpointFolder() = default;

  // The path of the folder to write to, which may be there already.
  // AlreadyExists for a step that there is, unless `overwrite`: then that one
  // stays until the new one is committed, or goes at once, by manifest.
  // FailedPrecondition where an earlier
  // Discard() of the step has failed: something is left of that one.
  absl::StatusOr<std::string> Begin(int64_t step, bool overwrite = false);

  // All files are written and synced: from now on it is a checkpoint, and the
  // latest. FailedPrecondition without Begin(); DataLoss if what is there is
  // not what the manifest says, by its sizes. After an error it is not one,
  // unless the text says so.
  absl::Status Commit(int64_t step, const Manifest& manifest);

  // Removes what was written since Begin().
  absl::Status Discard(int64_t step);

  // Removes the checkpoints that need not be kept; returns their steps.
  absl::StatusOr<std::vector<int64_t>> Prune(const Retention& retention);

  const std::string& root() const { return root_; }
  CommitBy commit_by() const { return commit_by_; }
  // Of this run; drawn by Claim().
  const std::string& token() const { return token_; }

 private:
  CheckpointFolder(FileSystem& files, std::string root, CommitBy commit_by,
                   std::unique_ptr<FileLock> lock);

  std::string PathToWrite(int64_t step) const {
    return WrittenPath(root_, step, token_, commit_by_);
  }
  bool by_manifest() const { return commit_by_ == CommitBy::kManifest; }

  absl::Status RemoveLeftovers();
  // What says how checkpoints are committed here becomes commit_by_.
  absl::Status SettleCommitBy();
  // What is to be committed is there and synced.
  absl::Status CheckWritten(const std::string& path, const Manifest& manifest);
  absl::Status CommitByRename(const Manifest& manifest);
  // Of a replacement that was not finished: the old one is back, or gone.
  absl::Status SettleReplaced(int64_t step);
  absl::Status MoveAside(int64_t step);
  // Says which one will be the latest, as soon as it is committed.
  absl::Status WriteNext(int64_t step);
  // What is committed outlives a loss of power, and is the latest.
  absl::Status Announce();
  // A run has died since WriteNext(): before its checkpoint was committed, or
  // after it.
  absl::Status SettleNext();
  // Is a checkpoint of `step` written that has not got its name?
  absl::StatusOr<bool> IsUncommitted(int64_t step);
  // What could not be announced is no checkpoint; returns `why`.
  absl::Status Undo(int64_t step, const absl::Status& why);
  // A committed one is whole until it is no more.
  absl::Status Remove(int64_t step, const std::string& path);

  FileSystem& files_;
  const std::string root_;
  const CommitBy commit_by_;
  const std::unique_ptr<FileLock> lock_;  // null by manifest
  const std::string token_;
  std::map<int64_t, bool> begun_;  // whether to overwrite
  std::set<int64_t> undiscarded_;  // steps of which something is left
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_COMMIT_CHECKPOINT_FOLDER_H_
