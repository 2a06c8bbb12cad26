#include "offload/backing_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "offload/io_error.h"

namespace fsdp::offload {
namespace {

absl::Status CannotMake(const std::string& path, int error) {
  const std::string text =
      absl::StrCat("make a file store at ", path, ": ", std::strerror(error));
  if (error == ENOENT || error == ENOTDIR) {
    return absl::NotFoundError(absl::StrCat(text, "; make the directory"));
  }
  if (error == EACCES || error == EPERM || error == EROFS) {
    return absl::PermissionDeniedError(
        absl::StrCat(text, "; choose a directory that can be written"));
  }
  return ErrnoStatus(error, absl::StrCat("make a file store at ", path));
}

// A name for a moment, for file systems that want one.
int OpenAndForget(const std::string& directory) {
  std::string name = absl::StrCat(directory, "/.offload_XXXXXX");
  const int descriptor = mkostemp(name.data(), O_CLOEXEC);
  if (descriptor < 0) return -errno;
  unlink(name.c_str());
  return descriptor;
}

std::string DirectoryOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// A new name lasts once its directory does.
void SyncDirectory(const std::string& directory) {
  const int descriptor = open(directory.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return;
  fsync(descriptor);
  close(descriptor);
}

}  // namespace

BackingFile::BackingFile(BackingFile&& other) noexcept
    : system_(other.system_),
      path_(std::move(other.path_)),
      unpublished_(std::exchange(other.unpublished_, "")),
      descriptor_(std::exchange(other.descriptor_, -1)),
      notes_(std::move(other.notes_)) {}

BackingFile::~BackingFile() {
  if (!unpublished_.empty()) unlink(unpublished_.c_str());
  if (descriptor_ >= 0) close(descriptor_);
}

absl::StatusOr<BackingFile> BackingFile::Scratch(SystemCalls& system,
                                                 const std::string& directory) {
  int descriptor = system.Open(directory, O_TMPFILE | O_RDWR);
  if (descriptor == -EOPNOTSUPP || descriptor == -EISDIR) {
    descriptor = OpenAndForget(directory);
  }
  if (descriptor < 0) return CannotMake(directory, -descriptor);
  return BackingFile(system, absl::StrCat("scratch file in ", directory),
                     descriptor);
}

absl::StatusOr<BackingFile> BackingFile::New(SystemCalls& system,
                                             const std::string& path,
                                             absl::Duration patience) {
  const std::string unpublished = absl::StrCat(path, ".new");
  const int descriptor = system.Open(unpublished, O_CREAT | O_RDWR);
  if (descriptor < 0) return CannotMake(path, -descriptor);
  BackingFile file(system, path, descriptor);
  FSDP_RETURN_IF_ERROR(file.Lock(patience));
  file.unpublished_ = unpublished;
  if (access(path.c_str(), F_OK) == 0) {
    return absl::AlreadyExistsError(
        absl::StrCat("make a file store at ", path,
                     ": there is a file; reopen it, or remove it"));
  }
  // What a process left that was killed while it made one.
  if (ftruncate(descriptor, 0) != 0) return CannotMake(path, errno);
  return file;
}

absl::StatusOr<BackingFile> BackingFile::Existing(SystemCalls& system,
                                                  const std::string& path,
                                                  absl::Duration patience) {
  const int descriptor = system.Open(path, O_RDWR);
  if (descriptor == -ENOENT) {
    return absl::NotFoundError(absl::StrCat("reopen the file store at ", path,
                                            ": there is no such file"));
  }
  if (descriptor < 0) return CannotMake(path, -descriptor);
  BackingFile file(system, path, descriptor);
  FSDP_RETURN_IF_ERROR(file.Lock(patience));
  return file;
}

absl::Status BackingFile::Lock(absl::Duration patience) {
  const absl::Time deadline = absl::Now() + patience;
  while (flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      return ErrnoStatus(errno, absl::StrCat("lock ", path_));
    }
    if (absl::Now() >= deadline) {
      return absl::UnavailableError(
          absl::StrCat("lock ", path_,
                       ": another process uses it; end that one, or give each "
                       "rank a file of its own"));
    }
    absl::SleepFor(absl::Milliseconds(5));
  }
  return absl::OkStatus();
}

absl::Status BackingFile::Reserve(int64_t bytes) {
  const int64_t free = system_->FreeBytes(descriptor_);
  const auto no_space = [&] {
    return absl::ResourceExhaustedError(absl::StrCat(
        "reserve ", path_, ": it needs ", bytes, " bytes, ", free,
        " are available; free space there or choose another directory"));
  };
  if (bytes > free) return no_space();
  const int error = bytes == 0 ? 0 : system_->Allocate(descriptor_, bytes);
  if (error == ENOSPC || error == EDQUOT) return no_space();
  if (error == EOPNOTSUPP) {
    Note("space not reserved: the file system cannot");
    if (ftruncate(descriptor_, bytes) == 0) return absl::OkStatus();
    return ErrnoStatus(errno, absl::StrCat("reserve ", path_));
  }
  if (error != 0) return ErrnoStatus(error, absl::StrCat("reserve ", path_));
  return absl::OkStatus();
}

void BackingFile::BypassCache() {
  const int error = system_->BypassCache(descriptor_);
  if (error == 0) {
    Note("O_DIRECT");
  } else {
    Note(
        absl::StrCat("through the page cache: the file system refuses "
                     "O_DIRECT (",
                     std::strerror(error), ")"));
  }
}

absl::Status BackingFile::Publish() {
  if (link(unpublished_.c_str(), path_.c_str()) != 0) {
    return CannotMake(path_, errno);
  }
  unlink(unpublished_.c_str());
  unpublished_.clear();
  SyncDirectory(DirectoryOf(path_));
  return absl::OkStatus();
}

absl::StatusOr<int64_t> BackingFile::Bytes() const {
  struct stat found = {};
  if (fstat(descriptor_, &found) != 0) {
    return ErrnoStatus(errno, absl::StrCat("look at ", path_));
  }
  return static_cast<int64_t>(found.st_size);
}

void BackingFile::Note(absl::string_view note) {
  absl::StrAppend(&notes_, notes_.empty() ? "" : ", ", note);
}

}  // namespace fsdp::offload
