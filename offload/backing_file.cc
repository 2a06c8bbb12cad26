#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/files/file_system.h"
#include "base/status_macros.h"
#include "offload/file_store.h"

namespace fsdp::offload {
namespace {

absl::Status NotTrusted(const std::string& path, absl::string_view why) {
  return absl::FailedPreconditionError(absl::StrCat(
      "open the file store at ", path, ": ", why,
      ", as none is that a file store has made; see who has put it there, and "
      "remove it or choose a directory that only you can write"));
}

absl::Status CannotOpen(const std::string& path, int error) {
  if (error == ELOOP) return NotTrusted(path, "it is a symbolic link");
  if (error == EISDIR) return NotTrusted(path, "it is a directory");
  if (error == ENOENT || error == ENOTDIR) {
    return absl::NotFoundError(absl::StrCat("open the file store at ", path,
                                            ": ", std::strerror(error),
                                            "; make the directory"));
  }
  return FileError(error, "open the file store at", path);
}

// Renames a file unless `to` exists already; returns 0 or an errno.
int RenameUnlessThere(const char* from, const char* to) {
  if (renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) == 0) return 0;
  if (errno != EINVAL && errno != ENOSYS) return errno;
  // The file system cannot. A process killed in between leaves both names.
  if (link(from, to) != 0) return errno;
  unlink(from);
  return 0;
}

// The suffix of a file that does not have its name yet.
constexpr char kUnpublished[] = ".new";

}  // namespace

BackingFile::BackingFile(BackingFile&& other) noexcept
    : system_(other.system_),
      path_(std::move(other.path_)),
      unpublished_(std::exchange(other.unpublished_, "")),
      descriptor_(std::move(other.descriptor_)),
      notes_(std::move(other.notes_)) {}

BackingFile::~BackingFile() {
  if (!unpublished_.empty()) unlink(unpublished_.c_str());
}

absl::StatusOr<BackingFile> BackingFile::Scratch(SystemCalls& system,
                                                 const std::string& directory) {
  int descriptor = system.Open(directory, O_TMPFILE | O_RDWR);
  if (descriptor == -EOPNOTSUPP || descriptor == -EISDIR) {
    std::string name = absl::StrCat(directory, "/.offload_XXXXXX");
    descriptor = mkostemp(name.data(), O_CLOEXEC);
    if (descriptor < 0) {
      descriptor = -errno;
    } else {
      unlink(name.c_str());
    }
  }
  if (descriptor < 0) return CannotOpen(directory, -descriptor);
  return BackingFile(system, absl::StrCat("scratch file in ", directory),
                     descriptor);
}

absl::StatusOr<BackingFile> BackingFile::New(SystemCalls& system,
                                             const std::string& path,
                                             absl::Duration patience) {
  const std::string unpublished = absl::StrCat(path, kUnpublished);
  const int descriptor =
      system.Open(unpublished, O_CREAT | O_RDWR | O_NOFOLLOW);
  if (descriptor < 0) return CannotOpen(unpublished, -descriptor);
  BackingFile file(system, unpublished, descriptor);
  FSDP_RETURN_IF_ERROR(file.LockTrusted(patience));
  file.path_ = path;
  file.unpublished_ = unpublished;
  if (access(path.c_str(), F_OK) == 0) {
    return absl::AlreadyExistsError(
        absl::StrCat("make a file store at ", path,
                     ": there is a file; reopen it, or remove it"));
  }
  // Removes what a process left that was killed while it made a store.
  if (ftruncate(descriptor, 0) != 0) return CannotOpen(path, errno);
  return file;
}

absl::StatusOr<BackingFile> BackingFile::Existing(SystemCalls& system,
                                                  const std::string& path,
                                                  absl::Duration patience) {
  const int descriptor = system.Open(path, O_RDWR | O_NOFOLLOW);
  if (descriptor == -ENOENT) {
    return absl::NotFoundError(absl::StrCat("reopen the file store at ", path,
                                            ": there is no such file"));
  }
  if (descriptor < 0) return CannotOpen(path, -descriptor);
  BackingFile file(system, path, descriptor);
  // Removes a name left by a process that was killed while it published.
  const std::string second = absl::StrCat(path, kUnpublished);
  struct stat mine = {};
  struct stat other = {};
  if (system.Stat(descriptor, &mine) == 0 && mine.st_nlink == 2 &&
      lstat(second.c_str(), &other) == 0 && mine.st_dev == other.st_dev &&
      mine.st_ino == other.st_ino) {
    unlink(second.c_str());
  }
  FSDP_RETURN_IF_ERROR(file.LockTrusted(patience));
  return file;
}

absl::Status BackingFile::CheckTrusted() const {
  struct stat found = {};
  if (const int error = system_->Stat(descriptor(), &found); error != 0) {
    return FileError(error, "look at", path_);
  }
  if (!S_ISREG(found.st_mode)) {
    return NotTrusted(path_, "it is no regular file");
  }
  if (found.st_uid != geteuid()) {
    return absl::PermissionDeniedError(absl::StrCat(
        "open the file store at ", path_, ": it belongs to user ", found.st_uid,
        " and this process to user ", geteuid(),
        "; whoever can write it chooses what is trained: use files and a "
        "directory of your own"));
  }
  if (found.st_nlink == 0) {
    return absl::UnavailableError(
        absl::StrCat("open the file store at ", path_,
                     ": another process has just removed it; try again"));
  }
  if (found.st_nlink != 1) {
    return NotTrusted(path_,
                      absl::StrCat("the file has ", found.st_nlink, " names"));
  }
  if ((found.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "open the file store at ", path_, ": other users can write it (mode ",
        absl::StrFormat("%04o", found.st_mode & 07777),
        "); if it holds what you have trained, chmod 600"));
  }
  return absl::OkStatus();
}

// Checks before, so that nobody waits for the lock of a useless file, and
// after, since things change meanwhile.
absl::Status BackingFile::LockTrusted(absl::Duration patience) {
  FSDP_RETURN_IF_ERROR(CheckTrusted());
  const absl::Time deadline = absl::Now() + patience;
  while (flock(descriptor(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      return FileError(errno, "lock", path_);
    }
    if (absl::Now() >= deadline) {
      return absl::UnavailableError(
          absl::StrCat("lock ", path_,
                       ": another process uses it; end that one, or give each "
                       "rank a file of its own"));
    }
    absl::SleepFor(absl::Milliseconds(5));
  }
  return CheckTrusted();
}

absl::Status BackingFile::Reserve(int64_t bytes) {
  const int64_t free = system_->FreeBytes(descriptor());
  const auto no_space = [&] {
    return absl::ResourceExhaustedError(absl::StrCat(
        "reserve ", path_, ": it needs ", bytes, " bytes, ", free,
        " are available; free space there or choose another directory"));
  };
  if (bytes > free) return no_space();
  const int error = bytes == 0 ? 0 : system_->Allocate(descriptor(), bytes);
  if (error == ENOSPC || error == EDQUOT) return no_space();
  if (error == EOPNOTSUPP) {
    Note("space not reserved: the file system cannot");
    if (ftruncate(descriptor(), bytes) == 0) return absl::OkStatus();
    return FileError(errno, "reserve", path_);
  }
  if (error == 0) return absl::OkStatus();
  return FileError(error, absl::StrCat("reserve ", bytes, " bytes for"), path_);
}

void BackingFile::BypassCache() {
  const int error = system_->BypassCache(descriptor());
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
  const int error = RenameUnlessThere(unpublished_.c_str(), path_.c_str());
  if (error != 0) return CannotOpen(path_, error);
  unpublished_.clear();
  // If this fails, a loss of power may cost the name.
  RealFileSystem().SyncFolder(FolderOf(path_)).IgnoreError();
  return absl::OkStatus();
}

absl::StatusOr<int64_t> BackingFile::Bytes() const {
  struct stat found = {};
  if (fstat(descriptor(), &found) != 0) {
    return FileError(errno, "look at", path_);
  }
  return static_cast<int64_t>(found.st_size);
}

void BackingFile::Note(absl::string_view note) {
  absl::StrAppend(&notes_, notes_.empty() ? "" : ", ", note);
}

}  // namespace fsdp::offload
