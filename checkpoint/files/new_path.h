// Writes a file or a folder that gets its name only when it is whole.
#ifndef CHECKPOINT_FILES_NEW_PATH_H_
#define CHECKPOINT_FILES_NEW_PATH_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint {

// Until then it is "PATH.incomplete", and "PATH.incomplete.lock" beside it is
// locked; the holder removes that file before it releases the lock, as Lock()
// expects. If several callers in any processes want one name, one gets it.
//
// A killed process leaves at most those two, which the next Claim() of that
// name replaces. Thread-compatible.
class NewPath {
 public:
  enum class Kind {
    kFolder,
    kFile,
    kReplacedFile,  // a file that replaces one of that name
  };

  // Ignores '/' at the end of `path`. `files` outlives it.
  NewPath(FileSystem& files, absl::string_view path, Kind kind);
  NewPath(const NewPath&) = delete;
  NewPath& operator=(const NewPath&) = delete;
  // Discards.
  ~NewPath();

  Kind kind() const { return kind_; }
  const std::string& path() const { return path_; }
  // The path to write to, also for ranks that write what another rank has
  // claimed. Whoever writes into a folder syncs what is in it.
  const std::string& incomplete() const { return incomplete_; }

  // Call it once, before anything is written; it makes the folder. `what` tells
  // others who come what this process does: "exports a model". Errors change
  // nothing: AlreadyExists if the name is taken, InvalidArgument if it is empty
  // or a file would replace a folder, FailedPrecondition, naming the holder, if
  // somebody else has the claim.
  absl::Status Claim(absl::string_view what);

  // Call it once, after Claim(). After OK the path has its name, also after a
  // loss of power, and nothing else remains, unless the disk refuses at the end
  // to remove the lock's file. After an error nothing remains, as after
  // Discard(); if the disk refuses to take the name back, or an older file is
  // already replaced, the error says that it is there. AlreadyExists: somebody
  // without a claim has taken the name.
  absl::Status Commit();

  // Ends the claim, if there is one, and removes what was begun.
  void Discard();

 private:
  absl::Status CheckIsFree();
  absl::Status Begin();
  absl::Status Rename();
  absl::Status UndoRename(const absl::Status& why);
  absl::Status RemoveIncomplete();
  void Release();

  FileSystem& files_;
  const std::string path_;
  const std::string incomplete_;
  const std::string lock_path_;
  const Kind kind_;
  std::unique_ptr<FileLock> lock_;  // null: no claim
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FILES_NEW_PATH_H_
