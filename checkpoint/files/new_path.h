// A file or a folder that gets its name once it is whole.
#ifndef CHECKPOINT_FILES_NEW_PATH_H_
#define CHECKPOINT_FILES_NEW_PATH_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint {

// Until then it is "PATH.incomplete", and "PATH.incomplete.lock" beside it is
// locked; its holder removes that file while it still has the lock, which
// Lock() expects. Of several that want one name, in whatever process, one gets
// it.
//
// A process that is killed leaves those two at most, which the next Claim() of
// that name replaces. Thread-compatible.
class NewPath {
 public:
  enum class Kind {
    kFolder,
    kFile,
    kReplacedFile,  // a file that has the name is replaced
  };

  // '/' at the end of `path` do not count. `files` has to outlive it.
  NewPath(FileSystem& files, absl::string_view path, Kind kind);
  NewPath(const NewPath&) = delete;
  NewPath& operator=(const NewPath&) = delete;
  // As Discard().
  ~NewPath();

  Kind kind() const { return kind_; }
  const std::string& path() const { return path_; }
  // Where to write; also known to ranks that write what another one has
  // claimed. What is in a folder has to be synced by whoever writes it.
  const std::string& incomplete() const { return incomplete_; }

  // Once, before anything is written; makes a folder. `what` the process does
  // is told to others who come: "exports a model". AlreadyExists for a name
  // that is taken, InvalidArgument for none and for a folder that a file would
  // replace, FailedPrecondition, naming who it is, while another one has the
  // claim. After an error nothing has changed.
  absl::Status Claim(absl::string_view what);

  // Once, after Claim(): it has its name by then, also after a loss of power,
  // and nothing else remains, unless the disk refuses to remove the lock's file
  // at the very end. After an error there is nothing, as after Discard(). Where
  // that cannot be, as the disk refuses to take the name back or an older file
  // is gone, the error says that it is there. AlreadyExists: somebody without a
  // claim has taken the name.
  absl::Status Commit();

  // Removes what was begun, where there is a claim; that ends.
  void Discard();

 private:
  absl::Status CheckIsFree();
  absl::Status Begin();
  absl::Status SyncContents();
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
