// File descriptors, and files that programs write for people and other
// programs.
#ifndef BASE_OUTPUT_FILE_H_
#define BASE_OUTPUT_FILE_H_

#include <unistd.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace fsdp {

// Owns a file descriptor and closes it.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.Release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    Reset(other.Release());
    return *this;
  }
  ~UniqueFd() { Reset(); }

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }

  // Gives the descriptor to the caller.
  int Release() { return std::exchange(fd_, -1); }

  void Reset(int fd = -1) {
    if (fd_ >= 0) close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

// A new file with a name of its own beside `path`. Publish() renames it, so
// `path` never holds half a file; a link there is replaced, not followed.
// Without Publish() nothing remains. Errors name `path`.
class PartialFile {
 public:
  static absl::StatusOr<PartialFile> Create(const std::string& path);
  PartialFile(PartialFile&& other) noexcept;
  PartialFile& operator=(PartialFile&&) = delete;
  ~PartialFile();

  // Open for reading and writing.
  int descriptor() const { return descriptor_.get(); }
  // Appends `bytes`.
  absl::Status Write(absl::string_view bytes);

  // Call it once, after the last write. All bytes are on the disk when it
  // returns.
  absl::Status Publish();

 private:
  PartialFile(std::string path, std::string temporary, UniqueFd descriptor)
      : path_(std::move(path)),
        temporary_(std::move(temporary)),
        descriptor_(std::move(descriptor)) {}

  std::string path_;
  std::string temporary_;  // empty: published, or moved from
  UniqueFd descriptor_;
};

// A file that is written as a whole, later. Open it before a long computation
// to hear of obstacles early. Thread-compatible.
class OutputFile {
 public:
  // Changes nothing. InvalidArgument: `path` is a directory, or a FIFO that
  // nobody reads; NotFound, PermissionDenied, ... as the system says.
  static absl::StatusOr<OutputFile> Open(const std::string& path);

  // Writes `contents`; a file holds all of them or what it held before. Devices
  // and pipes are written directly; DeadlineExceeded: nobody has taken any of
  // it for `patience`.
  absl::Status Write(absl::string_view contents,
                     absl::Duration patience = absl::Seconds(30));

 private:
  OutputFile(std::string path, UniqueFd descriptor)
      : path_(std::move(path)), descriptor_(std::move(descriptor)) {}

  std::string path_;
  UniqueFd descriptor_;  // of a device or pipe; closed: a file
};

// Calls Open() and Write().
absl::Status WriteOutputFile(const std::string& path,
                             absl::string_view contents);

// Returns the path that a user means by `path`: `bazel run` starts programs in
// another folder than the user's. An empty one stays empty.
std::string ResolvePath(const std::string& path);

// Reads of files that must be regular ones: a FIFO would wait for its writer,
// and a device may never end.

// Opens like open(2), but never waits. Returns -1 and sets errno: EISDIR for a
// folder, ENXIO for anything else that is no regular file.
int OpenRegularFile(const std::string& path, int flags);
// Opens `path` to read it. Errors name `path`; InvalidArgument: it is no
// regular file.
absl::StatusOr<UniqueFd> OpenToRead(const std::string& path);
// Reads the file. InvalidArgument also if it has more than a GiB.
absl::StatusOr<std::string> ReadRegularFile(const std::string& path);

// While this lives, the thread that has made it does not get a signal, and
// threads that are started meanwhile never get it. What has come by the end is
// forgotten.
class SignalBlock {
 public:
  explicit SignalBlock(int signal);
  SignalBlock(const SignalBlock&) = delete;
  SignalBlock& operator=(const SignalBlock&) = delete;
  ~SignalBlock();  // on the thread that made it; restores the former state

 private:
  const int signal_;
  bool was_blocked_;
};

// While this lives, a write of this thread beyond the limit on file sizes
// (`ulimit -f`) fails with EFBIG; without it SIGXFSZ ends the process without a
// word. Threads that are started meanwhile inherit it.
class FileSizeErrors : public SignalBlock {
 public:
  FileSizeErrors();
};

}  // namespace fsdp

#endif  // BASE_OUTPUT_FILE_H_
