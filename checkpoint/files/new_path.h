// Writes a file or a folder that gets its name only when it is whole.
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

// Moves all `bytes` by `move(done)`, which is pread(2) or pwrite(2) of the rest
// and may move fewer. Returns how many bytes it has moved; if not all, it
// leaves an errno, which is 0 if a call has moved nothing.
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

// Checks of names that become paths. Names that come from a file or a user
// cannot be trusted.

// InvalidArgument unless `name` is that of a file directly in a folder: it is
// not empty, "." or "..", has no '/', '\' or NUL, and at most 255 bytes.
absl::Status CheckPlainFileName(absl::string_view name);

// Checks each part of a path in the same way, so that the path does not leave
// the folder to which it is relative. At most 4096 bytes.
absl::Status CheckRelativePath(absl::string_view path);

// Returns "optimizer/" and "exp_avg" for "optimizer/exp_avg": together they are
// all of `path`. The first is empty for a name directly in its folder.
absl::string_view FolderPart(absl::string_view path);
absl::string_view LastPart(absl::string_view path);

// The error when the operating system refuses something about a file. Its text
// is "`what` `path`: " (`what` is "write", "open", ...), the text of `error`,
// an errno, and what to do. Its code is NotFound, PermissionDenied (also for a
// read-only mount), ResourceExhausted (no space, a quota, a limit),
// AlreadyExists, FailedPrecondition (a folder that is not empty, a file in
// place of a folder), InvalidArgument, or Unavailable for all else.
absl::Status FileError(int error, absl::string_view what,
                       absl::string_view path);

// DataLoss: of the `wanted` bytes from `offset` on, `path` has only `found`.
absl::Status EndsEarly(absl::string_view path, int64_t offset, int64_t wanted,
                       int64_t found);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FILES_NEW_PATH_H_
