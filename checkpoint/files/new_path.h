// A file or a folder that gets its name once it is whole.
#ifndef CHECKPOINT_FILES_NEW_PATH_H_
#define CHECKPOINT_FILES_NEW_PATH_H_

#include <sys/types.h>

#include <cerrno>
#include <cstdint>
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

// Moving bytes by calls that may move fewer.

// Moves all `bytes` by `move(done)`, which is pread(2) or pwrite(2) of the
// rest; returns how many it has moved and leaves an errno if those are not all:
// 0 where a call has moved nothing.
template <typename Move>
int64_t MoveAll(int64_t bytes, Move move) {
  int64_t done = 0;
  while (done < bytes) {
    const ssize_t count = move(done);
    if (count > 0) {
      done += count;
    } else if (count == 0) {
      errno = 0;
      break;
    } else if (errno != EINTR) {
      break;
    }
  }
  return done;
}

// Names that are paths: their parts, and which names may become paths. Those
// that come out of a file, or from a user, cannot be trusted. Who asks for more
// than this asks for this first.

// InvalidArgument for anything but the name of a file right in a folder: empty,
// "." or "..", with '/', '\' or NUL, longer than 255 bytes.
absl::Status CheckPlainFileName(absl::string_view name);

// The same for each part of a path, which leads to no place outside of the
// folder that it is relative to.
absl::Status CheckRelativePath(absl::string_view path);

// "optimizer/" and "exp_avg" of "optimizer/exp_avg": two parts of `path` that
// are all of it. The first is empty for a name right in its folder.
absl::string_view FolderPart(absl::string_view path);
absl::string_view LastPart(absl::string_view path);

// What is said when the operating system refuses something about a file.

// "`what` `path`: " (write, open, ...), the text of `error`, an errno, and what
// to do. NotFound, PermissionDenied (also for what is mounted read-only),
// ResourceExhausted (no space, a quota, a limit), AlreadyExists,
// FailedPrecondition (a folder that is not empty, a file in place of a folder),
// InvalidArgument, and Unavailable for all else.
absl::Status FileError(int error, absl::string_view what,
                       absl::string_view path);

// DataLoss: `path` ends after `found` of the `wanted` bytes from `offset` on.
absl::Status EndsEarly(absl::string_view path, int64_t offset, int64_t wanted,
                       int64_t found);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FILES_NEW_PATH_H_
