// The file of a file store: made, found, locked, left behind or not.
#ifndef OFFLOAD_BACKING_FILE_H_
#define OFFLOAD_BACKING_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "offload/system_calls.h"

namespace fsdp::offload {

// An open file. Scratch has no name (O_TMPFILE): the system frees it when the
// process ends, in whatever way. A kept one is locked by flock(2), which also
// ends with the process.
//
// A directory may be one of many users, in which names are easy to guess. A
// kept file is used only if it is a regular file, not a link to one, has one
// name, belongs to this process's user, and nobody else can write it.
class BackingFile {
 public:
  // Where file systems have no files without a name, the name goes right after
  // the file is made.
  static absl::StatusOr<BackingFile> Scratch(SystemCalls& system,
                                             const std::string& directory);

  // A file that gets its name, `path`, by Publish(), and is gone without.
  // AlreadyExists; Unavailable when `path` is being made by another process for
  // longer than `patience`; PermissionDenied or FailedPrecondition where
  // somebody has put another thing there.
  static absl::StatusOr<BackingFile> New(SystemCalls& system,
                                         const std::string& path,
                                         absl::Duration patience);

  // NotFound; Unavailable when another process has it for longer than
  // `patience`: one that was killed may have writes under way;
  // PermissionDenied or FailedPrecondition for what is not trusted.
  static absl::StatusOr<BackingFile> Existing(SystemCalls& system,
                                              const std::string& path,
                                              absl::Duration patience);

  BackingFile(BackingFile&& other) noexcept;
  BackingFile& operator=(BackingFile&&) = delete;
  ~BackingFile();

  // ResourceExhausted, with the bytes that are needed and those there are.
  absl::Status Reserve(int64_t bytes);

  // Past the page cache where the file system can.
  void BypassCache();

  absl::Status Publish();

  absl::StatusOr<int64_t> Bytes() const;

  int descriptor() const { return descriptor_; }
  const std::string& path() const { return path_; }
  // "O_DIRECT", or what else and why.
  const std::string& notes() const { return notes_; }

 private:
  BackingFile(SystemCalls& system, std::string path, int descriptor)
      : system_(&system), path_(std::move(path)), descriptor_(descriptor) {}

  absl::Status Lock(absl::Duration patience);
  void ForgetSecondName() const;
  absl::Status CheckTrusted() const;
  absl::Status LockTrusted(absl::Duration patience);
  void Note(absl::string_view note);

  SystemCalls* system_;
  std::string path_;
  std::string unpublished_;  // the name to remove, if it is not published
  int descriptor_;
  std::string notes_;
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_BACKING_FILE_H_
