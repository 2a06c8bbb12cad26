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

}  // namespace fsdp

#endif  // BASE_OUTPUT_FILE_H_
