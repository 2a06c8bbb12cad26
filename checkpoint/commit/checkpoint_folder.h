// The folder of a run's checkpoints, each of which exists as a whole or not at
// all.
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
#include "base/files/file_system.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/commit/save_layout.h"

namespace fsdp::checkpoint {

struct Retention {
  int64_t keep_last = 0;   // how many of the newest are kept; 0: all
  int64_t keep_every = 0;  // multiples of this step are kept; 0: none
  std::set<int64_t> keep;  // more steps to keep, as the one that was loaded
  std::set<int64_t> ignore = {};  // neither counted nor removed
};

// Rank 0 owns it. The other ranks write into WrittenPath(root, step, token,
// commit_by), which the first to come makes, after Claim() and before Commit();
// for a step that was given up also after Discard(), and by manifest after
// Begin(), which removes what is there. Whatever is killed when,
// ListCheckpoints() has what was committed last. Errors without a name here are
// those of FileSystem. Thread-compatible.
class CheckpointFolder {
 public:
  // Makes the folder, whose parent must exist, or takes one that is ours or
  // empty, and removes what dead runs have left half done. FailedPrecondition:
  // the folder has other things in it, or, unless it is by manifest, another
  // run, which the text names, has it.
  static absl::StatusOr<std::unique_ptr<CheckpointFolder>> Claim(
      FileSystem& files, const std::string& root,
      CommitBy commit_by = CommitBy::kRename);
  CheckpointFolder(const CheckpointFolder&) = delete;
  CheckpointFolder& operator=(const CheckpointFolder&) = delete;
  // After that another run may claim it.
  ~CheckpointFolder() = default;

  // Returns the path of the folder to write to, which may exist. AlreadyExists:
  // there is a checkpoint of that step, and not `overwrite`, with which it
  // stays until the new one is committed, or by manifest goes at once.
  // FailedPrecondition: an earlier Discard() of the step has failed and left
  // something.
  absl::StatusOr<std::string> Begin(int64_t step, bool overwrite = false);

  // Makes what was written the latest checkpoint. All its files are written and
  // synced. FailedPrecondition: the step was not begun. DataLoss: the sizes of
  // the files are not those of the manifest. After an error it is no
  // checkpoint, unless the text says so.
  absl::Status Commit(int64_t step, const Manifest& manifest);

  // Removes what was written since Begin().
  absl::Status Discard(int64_t step);

  // Removes the checkpoints that need not be kept, and returns their steps,
  // rising: never the newest, nor the latest. An error is that of a folder that
  // could not be removed now or since the last call, as some network file
  // systems keep files that somebody reads. The next call, or by manifest the
  // next Claim(), tries again.
  absl::StatusOr<std::vector<int64_t>> Prune(const Retention& retention);

  CommitBy commit_by() const { return commit_by_; }
  // Identifies this run; Claim() draws it at random.
  const std::string& token() const { return token_; }

 private:
  CheckpointFolder(FileSystem& files, std::string root, CommitBy commit_by,
                   FileLock lock);

  std::string PathToWrite(int64_t step) const {
    return WrittenPath(root_, step, token_, commit_by_);
  }
  bool by_manifest() const { return commit_by_ == CommitBy::kManifest; }

  absl::Status RemoveLeftovers();
  // Makes the folder say that it commits as commit_by_ has it.
  absl::Status SettleCommitBy();
  absl::Status CommitByRename(const Manifest& manifest);
  // Ends a replacement that was not finished: the old one is back, or gone.
  absl::Status SettleReplaced(int64_t step);
  // Notes which checkpoint will be the latest as soon as it is committed.
  absl::Status WriteNext(int64_t step);
  // Makes the committed checkpoint survive a loss of power, and the latest.
  absl::Status Announce();
  // Settles the note of WriteNext() if a run has died before or after the
  // commit.
  absl::Status SettleNext();
  // Removes a checkpoint, which stays whole until it stops being one. What is
  // left of it then is for Prune().
  absl::Status Remove(int64_t step, const std::string& path);
  // Removes what Remove() has left.
  absl::Status RemoveDeleted();

  FileSystem& files_;
  const std::string root_;
  const CommitBy commit_by_;
  const FileLock lock_;  // null by manifest
  const std::string token_;
  std::map<int64_t, bool> begun_;  // by step: whether to overwrite
  std::set<int64_t> undiscarded_;  // steps of which something is left
  absl::Status unremoved_;         // why a checkpoint is not wholly removed
};

// Returns `why`, an error, with "; step N may be saved all the same" at its
// end: for a commit that has neither succeeded nor been undone.
absl::Status MayBeSaved(const absl::Status& why, int64_t step);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_COMMIT_CHECKPOINT_FOLDER_H_
