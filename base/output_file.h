// Files that programs write for people and other programs.
#ifndef BASE_OUTPUT_FILE_H_
#define BASE_OUTPUT_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace fsdp {

// A new file under a name of its own beside `path`, which it takes in
// Publish(): `path` never holds half a file, and is replaced, not followed,
// where it is a link. Without Publish() nothing remains. Errors name `path`.
class PartialFile {
 public:
  static absl::StatusOr<PartialFile> Create(const std::string& path);
  PartialFile(PartialFile&& other) noexcept;
  PartialFile& operator=(PartialFile&&) = delete;
  ~PartialFile();

  // Open for reading and writing.
  int descriptor() const { return descriptor_; }
  // Adds to what has been written.
  absl::Status Write(absl::string_view bytes);

  // Once, after the last write. All of it is on the disk by then.
  absl::Status Publish();

 private:
  PartialFile(std::string path, std::string temporary, int descriptor);

  std::string path_;
  std::string temporary_;  // empty: published, or moved from
  int descriptor_;
};

// A file that is written as a whole, later. Opened before a long computation,
// so that what is in the way is said before and not after. Thread-compatible.
class OutputFile {
 public:
  // InvalidArgument for a directory and for a FIFO that nobody reads; NotFound,
  // PermissionDenied, ... as the system says. Changes nothing.
  static absl::StatusOr<OutputFile> Open(const std::string& path);
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;
  ~OutputFile();

  // A file holds all of `contents` or what it held before. Into devices and
  // pipes it is written as it is; DeadlineExceeded when nobody has taken any of
  // it for `patience`.
  absl::Status Write(absl::string_view contents,
                     absl::Duration patience = absl::Seconds(30));

 private:
  OutputFile(std::string path, int descriptor);

  std::string path_;
  int descriptor_;  // of what is no file; -1: a file
};

// Open() and Write().
absl::Status WriteOutputFile(const std::string& path,
                             absl::string_view contents);

// Files to read that have to be files: a FIFO would wait for whoever writes to
// it, and a device may never end.

// open(2), which waits for nobody here. -1 and an errno: EISDIR for a folder,
// ENXIO for anything else that is no regular file.
int OpenRegularFile(const std::string& path, int flags);
// To read it. Errors name `path`; InvalidArgument: it is no regular file.
absl::StatusOr<int> OpenToRead(const std::string& path);
// All of it. InvalidArgument also for more than a GiB.
absl::StatusOr<std::string> ReadRegularFile(const std::string& path);

// The limit on the size of files (`ulimit -f`) as an error like any other.

// While one exists, what this thread writes past the limit fails with EFBIG.
// Without, SIGXFSZ ends the process, and nothing says why. Threads that are
// started meanwhile inherit it.
class FileSizeErrors {
 public:
  FileSizeErrors();
  FileSizeErrors(const FileSizeErrors&) = delete;
  FileSizeErrors& operator=(const FileSizeErrors&) = delete;
  ~FileSizeErrors();  // of the thread that made it; restores what was

 private:
  bool was_blocked_;
};

}  // namespace fsdp

#endif  // BASE_OUTPUT_FILE_H_
