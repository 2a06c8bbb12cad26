// Makes, finds and locks the file of a file store, and decides whether it
// stays.
#ifndef OFFLOAD_BACKING_FILE_H_
#define OFFLOAD_BACKING_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/output_file.h"
#include "offload/system_calls.h"

namespace fsdp::offload {

// An open file. A scratch file has no name (O_TMPFILE), so the system frees it
// when the process ends in any way. A kept file is locked by flock(2), which
// also ends with the process.
//
// A directory may have many users and names that are easy to guess. A kept file
// is used only if it is a regular file and not a link, has one name, belongs to
// this process's user, and can be written by nobody else.
class BackingFile {
 public:
  // Makes a file without a name. If the file system has none, it loses its name
  // right away.
  static absl::StatusOr<BackingFile> Scratch(SystemCalls& system,
                                             const std::string& directory);

  // Makes a file that gets its name `path` by Publish(), and is gone without
  // it. AlreadyExists; Unavailable: another process is making `path` for longer
  // than `patience`; PermissionDenied or FailedPrecondition: somebody has put
  // another thing there.
  static absl::StatusOr<BackingFile> New(SystemCalls& system,
                                         const std::string& path,
                                         absl::Duration patience);

  // Opens a kept file. NotFound; Unavailable: another process has it for longer
  // than `patience` (one that was killed may have writes under way);
  // PermissionDenied or FailedPrecondition: the file is not trusted.
  static absl::StatusOr<BackingFile> Existing(SystemCalls& system,
                                              const std::string& path,
                                              absl::Duration patience);

  BackingFile(BackingFile&& other) noexcept;
  BackingFile& operator=(BackingFile&&) = delete;
  ~BackingFile();

  // Reserves space. ResourceExhausted tells the bytes needed and available.
  absl::Status Reserve(int64_t bytes);

  // Bypasses the page cache if the file system can.
  void BypassCache();

  absl::Status Publish();

  absl::StatusOr<int64_t> Bytes() const;

  int descriptor() const { return descriptor_.get(); }
  const std::string& path() const { return path_; }
  // "O_DIRECT", or what is used instead and why.
  const std::string& notes() const { return notes_; }

 private:
  BackingFile(SystemCalls& system, std::string path, int descriptor)
      : system_(&system), path_(std::move(path)), descriptor_(descriptor) {}

  absl::Status LockTrusted(absl::Duration patience);
  absl::Status CheckTrusted() const;
  void Note(absl::string_view note);

  SystemCalls* system_;
  std::string path_;
  std::string unpublished_;  // a name to remove unless the file is published
  UniqueFd descriptor_;
  std::string notes_;
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_BACKING_FILE_H_
