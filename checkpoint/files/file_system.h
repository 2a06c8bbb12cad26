// The seam through which checkpoint code touches the disk: tests count its
// calls, fail them, and cut the power between them.
#ifndef CHECKPOINT_FILES_FILE_SYSTEM_H_
#define CHECKPOINT_FILES_FILE_SYSTEM_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace fsdp::checkpoint {

// An open file. Thread-safe, as long as no two calls write the same bytes at
// the same time. Every error names the file, what the system says, and what to
// do (file_error.h).
class File {
 public:
  File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  virtual ~File() = default;

  // All of `out`, from byte `offset` of the file on. DataLoss if it ends
  // before.
  virtual absl::Status PRead(int64_t offset, absl::Span<char> out) = 0;
  // All of `bytes`; the file grows as needed.
  virtual absl::Status PWrite(int64_t offset, absl::Span<const char> bytes) = 0;
  // Cuts it off, or lets it grow by zeros.
  virtual absl::Status SetSize(int64_t bytes) = 0;
  // What was written, and the size, survives a loss of power. Not its name:
  // that is SyncFolder()'s.
  virtual absl::Status Sync() = 0;
  virtual absl::StatusOr<int64_t> Size() = 0;

  // Reads and writes whose memory, offset and size are multiples of this go
  // past the page cache; 0: none do. At least a page of the system, so that
  // those of two processes never meet in one page of the cache.
  virtual int64_t direct_bytes() const { return 0; }
};

// Held as long as it lives, at most until its process ends.
class FileLock {
 public:
  FileLock() = default;
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  virtual ~FileLock() = default;
};

enum class Caching {
  kCached,
  kDirect,  // past the page cache where the file system can
};

struct FileInfo {
  enum class Kind { kFile, kFolder, kOther };  // a link is kOther

  Kind kind = Kind::kFile;
  int64_t bytes = 0;  // of a file
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
  // Created, empty, if there is none; what is there stays. Not for reading: a
  // host that reads a page of a network file system to write a part of it may
  // write it back whole, over what another host has written there.
  virtual absl::StatusOr<std::unique_ptr<File>> OpenForWriting(
      const std::string& path, Caching caching) = 0;

  // False: there was a folder already. Its parent has to exist.
  virtual absl::StatusOr<bool> MakeFolder(const std::string& path) = 0;
  // Both in one folder. A file that has the name `to` is replaced, at once.
  virtual absl::Status Rename(const std::string& from,
                              const std::string& to) = 0;
  virtual absl::Status RemoveFile(const std::string& path) = 0;
  // FailedPrecondition if it is not empty.
  virtual absl::Status RemoveFolder(const std::string& path) = 0;
  // What was created, renamed and removed in it survives a loss of power.
  virtual absl::Status SyncFolder(const std::string& path) = 0;

  // Names, sorted, without "." and "..".
  virtual absl::StatusOr<std::vector<std::string>> List(
      const std::string& folder) = 0;
  // NotFound.
  virtual absl::StatusOr<FileInfo> Stat(const std::string& path) = 0;
  // How many bytes a user without privileges can still have in this folder.
  virtual absl::StatusOr<int64_t> FreeBytes(const std::string& folder) = 0;

  // Locks the file `path`, which is created if there is none, against all other
  // processes and callers, and writes `holder` into it. FailedPrecondition,
  // with what the holder has written there, while somebody has it. The holder
  // may remove the file, whoever comes then locks a new one. After an error
  // there is no file that was not there before.
  virtual absl::StatusOr<std::unique_ptr<FileLock>> Lock(
      const std::string& path, absl::string_view holder) = 0;
};

// "process 7 on the-host", for the text of Lock().
std::string ThisProcess();

// "folder/name".
std::string JoinPath(absl::string_view folder, absl::string_view name);
// "." for a name without folder, "/" for what is at the top.
std::string FolderOf(absl::string_view path);

// True, or false for what Stat() does not find.
absl::StatusOr<bool> Exists(FileSystem& files, const std::string& path);

// Whether it is a folder, or a link to one. NotFound.
absl::StatusOr<bool> IsFolder(FileSystem& files, const std::string& path);

// The folder and all that is in it, which no link is followed for; OK if there
// is none, or if it goes with the last of its files, as in an object store.
// InvalidArgument for more than 8 folders in each other.
absl::Status RemoveTree(FileSystem& files, const std::string& path);

// ResourceExhausted for more than `max_bytes`.
absl::StatusOr<std::string> ReadFile(FileSystem& files, const std::string& path,
                                     int64_t max_bytes);

// Creates or overwrites it. What it holds survives a loss of power, its name
// once its folder is synced.
absl::Status WriteFile(FileSystem& files, const std::string& path,
                       absl::string_view contents);

// The same of a file that is not there yet: as storage takes it that writes no
// byte twice and cannot change a size.
absl::Status WriteNewFile(FileSystem& files, const std::string& path,
                          absl::string_view contents);

// `path` holds what it held before or all of `contents`, whatever happens, and
// after OK the latter, on the disk. "`path`.tmp" may remain otherwise.
absl::Status ReplaceFile(FileSystem& files, const std::string& path,
                         absl::string_view contents);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FILES_FILE_SYSTEM_H_
