#include "base/output_file.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace fsdp {
namespace {

constexpr int kAttempts = 100;

absl::Status CannotWrite(int error, const std::string& path) {
  const std::string what = absl::StrCat("writing ", path);
  switch (error) {
    case EFBIG:
      return absl::ResourceExhaustedError(
          absl::StrCat(what,
                       ": it would be larger than this process may make a file "
                       "(ulimit -f); raise that limit"));
    case EISDIR:
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": it is a directory; name a file"));
    case ENXIO:
      return absl::InvalidArgumentError(
          absl::StrCat(what,
                       ": it is a socket, or a FIFO and nobody reads it; "
                       "start its reader first, or name a file"));
    default:
      return absl::ErrnoToStatus(error, what);
  }
}

// Returns whether `path` may be another name for a file, as /dev/stdout is.
bool IsOfTheSystem(absl::string_view path) {
  return absl::StartsWith(path, "/dev/") || absl::StartsWith(path, "/proc/");
}

absl::Status WaitForRoom(int descriptor, absl::Duration patience,
                         const std::string& path) {
  pollfd room = {descriptor, POLLOUT, 0};
  const int found =
      poll(&room, 1, static_cast<int>(absl::ToInt64Milliseconds(patience)));
  if (found > 0 || (found < 0 && errno == EINTR)) return absl::OkStatus();
  if (found < 0) return CannotWrite(errno, path);
  return absl::DeadlineExceededError(
      absl::StrCat("writing ", path, ": nobody has read any of it for ",
                   absl::FormatDuration(patience)));
}

absl::Status WriteAll(int descriptor, absl::string_view bytes,
                      absl::Duration patience, const std::string& path) {
  const FileSizeErrors errors;
  while (!bytes.empty()) {
    const ssize_t count = write(descriptor, bytes.data(), bytes.size());
    if (count >= 0) {
      bytes.remove_prefix(static_cast<size_t>(count));
    } else if (errno == EAGAIN) {
      FSDP_RETURN_IF_ERROR(WaitForRoom(descriptor, patience, path));
    } else if (errno != EINTR) {
      return CannotWrite(errno, path);
    }
  }
  return absl::OkStatus();
}

}  // namespace

PartialFile::PartialFile(PartialFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, "")),
      descriptor_(std::move(other.descriptor_)) {}

PartialFile::~PartialFile() {
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

absl::StatusOr<PartialFile> PartialFile::Create(const std::string& path) {
  std::random_device random;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    // Nobody else can have put something under this name.
    std::string temporary =
        absl::StrCat(path, ".partial.", absl::Hex(random(), absl::kZeroPad8));
    UniqueFd descriptor(open(temporary.c_str(),
                             O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                             0666));
    if (descriptor.is_open()) {
      return PartialFile(path, std::move(temporary), std::move(descriptor));
    }
    if (errno == EACCES || errno == EPERM) {
      return absl::PermissionDeniedError(absl::StrCat(
          "writing ", path,
          ": files cannot be made in its directory; name another one"));
    }
    if (errno != EEXIST) return CannotWrite(errno, path);
  }
  return CannotWrite(EEXIST, path);
}

absl::Status PartialFile::Write(absl::string_view bytes) {
  return WriteAll(descriptor(), bytes, absl::InfiniteDuration(), path_);
}

absl::Status PartialFile::Publish() {
  // Only here may a full disk be noticed. Not every file can be synced.
  if (fsync(descriptor()) != 0 && errno != EINVAL && errno != EROFS) {
    return CannotWrite(errno, path_);
  }
  if (close(descriptor_.Release()) != 0 ||
      std::rename(temporary_.c_str(), path_.c_str()) != 0) {
    return CannotWrite(errno, path_);
  }
  temporary_.clear();
  return absl::OkStatus();
}

absl::StatusOr<OutputFile> OutputFile::Open(const std::string& path) {
  struct stat found = {};
  const bool exists = stat(path.c_str(), &found) == 0;
  if (exists && (!S_ISREG(found.st_mode) || IsOfTheSystem(path))) {
    UniqueFd descriptor(open(
        path.c_str(), O_WRONLY | O_APPEND | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
    if (!descriptor.is_open()) return CannotWrite(errno, path);
    return OutputFile(path, std::move(descriptor));
  }
  if (exists && access(path.c_str(), W_OK) != 0) {
    return CannotWrite(errno, path);
  }
  FSDP_RETURN_IF_ERROR(PartialFile::Create(path).status());
  return OutputFile(path, UniqueFd());
}

absl::Status OutputFile::Write(absl::string_view contents,
                               absl::Duration patience) {
  if (descriptor_.is_open()) {
    return WriteAll(descriptor_.get(), contents, patience, path_);
  }
  FSDP_ASSIGN_OR_RETURN(PartialFile file, PartialFile::Create(path_));
  FSDP_RETURN_IF_ERROR(file.Write(contents));
  return file.Publish();
}

std::string ResolvePath(const std::string& path) {
  const char* const folder = std::getenv("BUILD_WORKING_DIRECTORY");
  if (path.empty() || folder == nullptr) return path;
  return std::filesystem::path(folder) / path;
}

absl::Status WriteOutputFile(const std::string& path,
                             absl::string_view contents) {
  FSDP_ASSIGN_OR_RETURN(OutputFile file, OutputFile::Open(path));
  return file.Write(contents);
}

int OpenRegularFile(const std::string& path, int flags) {
  const int descriptor = TEMP_FAILURE_RETRY(
      open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK, 0666));
  if (descriptor < 0) return -1;
  struct stat found = {};
  const int error = fstat(descriptor, &found) != 0 ? errno
                    : S_ISREG(found.st_mode)       ? 0
                    : S_ISDIR(found.st_mode)       ? EISDIR
                                                   : ENXIO;
  if (error == 0) return descriptor;
  close(descriptor);
  errno = error;
  return -1;
}

absl::StatusOr<UniqueFd> OpenToRead(const std::string& path) {
  UniqueFd descriptor(OpenRegularFile(path, O_RDONLY));
  if (descriptor.is_open()) return descriptor;
  const std::string what = absl::StrCat("reading ", path);
  if (errno != ENXIO && errno != EISDIR) {
    return absl::ErrnoToStatus(errno, what);
  }
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": it is no regular file"));
}

absl::StatusOr<std::string> ReadRegularFile(const std::string& path) {
  constexpr size_t kMaxBytes = size_t{1} << 30;
  FSDP_ASSIGN_OR_RETURN(const UniqueFd descriptor, OpenToRead(path));
  std::string text;
  std::array<char, 1 << 16> block;
  ssize_t count = 0;
  while ((count = read(descriptor.get(), block.data(), block.size())) > 0) {
    text.append(block.data(), count);
    if (text.size() <= kMaxBytes) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("reading ", path, ": it has more than a GiB"));
  }
  if (count == 0) return text;
  return absl::ErrnoToStatus(errno, absl::StrCat("reading ", path));
}

namespace {

sigset_t Only(int signal) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  return set;
}

}  // namespace

SignalBlock::SignalBlock(int signal) : signal_(signal) {
  const sigset_t set = Only(signal);
  sigset_t previous;
  pthread_sigmask(SIG_BLOCK, &set, &previous);
  was_blocked_ = sigismember(&previous, signal) == 1;
}

SignalBlock::~SignalBlock() {
  if (was_blocked_) return;
  // The kernel sends SIGXFSZ and SIGPIPE to the thread that writes.
  const sigset_t set = Only(signal_);
  const timespec at_once = {};
  while (sigtimedwait(&set, nullptr, &at_once) == signal_) {
  }
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

FileSizeErrors::FileSizeErrors() : SignalBlock(SIGXFSZ) {}

}  // namespace fsdp
