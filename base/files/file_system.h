// A disk, and files and folders on it that are whole or not there. What goes
// through this interface can be tested: tests count calls, fail them, and cut
// the power between them.
#ifndef BASE_FILES_FILE_SYSTEM_H_
#define BASE_FILES_FILE_SYSTEM_H_

#include <sys/types.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace fsdp {

// An open file. Thread-safe as long as no two calls write the same bytes at the
// same time. Every error names the file, what the system says, and what to do
// (FileError()).
class File {
 public:
  File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  virtual ~File() = default;

  // Reads all of `out` from byte `offset` of the file on. DataLoss: the file
  // ends before that.
  virtual absl::Status PRead(int64_t offset, absl::Span<char> out) = 0;
  // Writes all of `bytes`; the file grows as needed.
  virtual absl::Status PWrite(int64_t offset, absl::Span<const char> bytes) = 0;
  // Cuts the file off, or lets it grow by zeros.
  virtual absl::Status SetSize(int64_t bytes) = 0;
  // Makes the contents and the size survive a loss of power. SyncFolder() does
  // so for the name.
  virtual absl::Status Sync() = 0;
  virtual absl::StatusOr<int64_t> Size() = 0;
};

// A lock that is held as long as this lives, at most until the process ends;
// null: none.
using FileLock = std::shared_ptr<void>;

enum class Caching {
  kCached,
  // Whole pages go past the page cache if the file system can, and if their
  // memory is aligned as they are in the file. The others at the ends of a call
  // go through it, so that those of two processes never meet in one page.
  kDirect,
  // The same, but a read takes its bytes from the cache if all are there.
  kDirectUnlessCached,
};

struct FileInfo {
  enum class Kind { kFile, kFolder, kOther };  // a link is kOther

  Kind kind = Kind::kFile;
  int64_t bytes = 0;  // of a file
};

// A file by its name in a folder, and the size that it has or must have.
struct NamedSize {
  std::string name;
  int64_t bytes = 0;
};

// The place of bytes in one of several files.
struct FilePlace {
  int64_t file = 0;    // the index in a list of files
  int64_t offset = 0;  // bytes from the beginning of the file
  int64_t bytes = 0;
};

// Thread-safe. Calls that change something are those of File that do not read,
// and all here but OpenForReading(), List(), Stat() and FreeBytes().
class FileSystem {
 public:
  FileSystem() = default;
  FileSystem(const FileSystem&) = delete;
  FileSystem& operator=(const FileSystem&) = delete;
  virtual ~FileSystem() = default;

  virtual absl::StatusOr<std::unique_ptr<File>> OpenForReading(
      const std::string& path, Caching caching) = 0;
  // Creates an empty file if there is none, and keeps what is there. The file
  // cannot be read: a host that reads a page of a network file system to write
  // a part of it may write back the whole page, over another host's bytes.
  virtual absl::StatusOr<std::unique_ptr<File>> OpenForWriting(
      const std::string& path, Caching caching) = 0;

  // Returns false if the folder exists already. Its parent must exist.
  virtual absl::StatusOr<bool> MakeFolder(const std::string& path) = 0;
  // Renames within one folder. Replaces a file named `to` in one instant.
  virtual absl::Status Rename(const std::string& from,
                              const std::string& to) = 0;
  virtual absl::Status RemoveFile(const std::string& path) = 0;
  // FailedPrecondition: it is not empty.
  virtual absl::Status RemoveFolder(const std::string& path) = 0;
  // Makes what was created, renamed and removed in it survive a loss of power.
  virtual absl::Status SyncFolder(const std::string& path) = 0;

  // Returns the names, sorted, without "." and "..".
  virtual absl::StatusOr<std::vector<std::string>> List(
      const std::string& folder) = 0;
  // NotFound: there is nothing of that name.
  virtual absl::StatusOr<FileInfo> Stat(const std::string& path) = 0;
  // Returns the bytes that a user without privileges can still store there.
  virtual absl::StatusOr<int64_t> FreeBytes(const std::string& folder) = 0;

  // Locks the file `path`, which is created if there is none, against all other
  // processes and callers, and writes `holder` into it. FailedPrecondition,
  // with that text: somebody else holds it. The holder may remove the file; the
  // next to come locks a new one. An error leaves no new file.
  virtual absl::StatusOr<FileLock> Lock(const std::string& path,
                                        absl::string_view holder) = 0;
};

// The disk of this machine. Uses Linux' calls: O_DIRECT if the file system has
// it, fdatasync(2), flock(2). Links are followed on the way to a file, but not
// as its last name when something is created or removed.
FileSystem& RealFileSystem();

// Returns `files`, or RealFileSystem() if it is null.
FileSystem& OrReal(FileSystem* files);

// Returns "process 7 on the-host", for the text of Lock().
std::string ThisProcess();

// Returns "folder/name".
std::string JoinPath(absl::string_view folder, absl::string_view name);
// Returns "." for a name without a folder, "/" for a name right in the root.
std::string FolderOf(absl::string_view path);

// Returns false if Stat() returns NotFound.
absl::StatusOr<bool> Exists(FileSystem& files, const std::string& path);

// Returns whether it is a folder or a link to one. NotFound: there is nothing.
absl::StatusOr<bool> IsFolder(FileSystem& files, const std::string& path);

// Removes the folder and all that is in it, without following links. OK also if
// there is none, or if it vanishes with the last of its files, as in an object
// store. InvalidArgument: folders are nested more than 8 deep.
absl::Status RemoveTree(FileSystem& files, const std::string& path);

// Returns the contents. ResourceExhausted: they exceed `max_bytes`.
absl::StatusOr<std::string> ReadFile(FileSystem& files, const std::string& path,
                                     int64_t max_bytes);

// Creates or overwrites the file. Its contents survive a loss of power; its
// name does once its folder is synced.
absl::Status WriteFile(FileSystem& files, const std::string& path,
                       absl::string_view contents);

// Does the same for a new file, on storage that writes no byte twice and cannot
// change a size.
absl::Status WriteNewFile(FileSystem& files, const std::string& path,
                          absl::string_view contents);

// Whatever happens, `path` has its old contents or all of `contents`; after OK
// the latter, on the disk. After an error "`path`.tmp" may remain.
absl::Status ReplaceFile(FileSystem& files, const std::string& path,
                         absl::string_view contents);

// Writes a folder that gets its name only when it is whole. Until then it is
// "PATH.incomplete", and "PATH.incomplete.lock" beside it is locked; the holder
// removes that file before it releases the lock, as Lock() expects. If several
// callers in any processes want one name, one gets it.
//
// A killed process leaves at most those two, which the next Claim() of that
// name replaces. Thread-compatible.
class NewFolder {
 public:
  // Ignores '/' at the end of `path`. `files` outlives it.
  NewFolder(FileSystem& files, absl::string_view path);
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;
  // Discards.
  ~NewFolder();

  const std::string& path() const { return path_; }
  // The path to write to, also for ranks that write what another rank has
  // claimed. Whoever writes into a folder syncs what is in it.
  const std::string& incomplete() const { return incomplete_; }

  // Call it once, before anything is written; it makes the folder. `what` tells
  // others who come what this process does: "exports a model". Errors change
  // nothing: AlreadyExists if the name is taken, InvalidArgument if it is
  // empty, FailedPrecondition, naming the holder, if somebody else has the
  // claim.
  absl::Status Claim(absl::string_view what);

  // Call it once, after Claim(). After OK the path has its name, also after a
  // loss of power, and nothing else remains, unless the disk refuses at the end
  // to remove the lock's file. After an error nothing remains, as after
  // Discard(); if the disk refuses to take the name back, the error says that
  // it is there. AlreadyExists: somebody without a claim has taken the name.
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
  FileLock lock_;  // null: no claim
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

// Returns whether `name` is that of a file directly in a folder: it is not
// empty, "." or "..", has no '/', '\' or NUL, and at most kMaxNameBytes. Names
// that come from a file or a user cannot be trusted.
inline constexpr size_t kMaxNameBytes = 255;
bool IsPlainFileName(absl::string_view name);

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

}  // namespace fsdp

#endif  // BASE_FILES_FILE_SYSTEM_H_
