#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/files/file_system.h"
#include "base/output_file.h"
#include "base/status_macros.h"

namespace fsdp {
namespace {

constexpr size_t kMaxHolderBytes = 512;
// Tries to lock a file that others remove.
constexpr int kMaxTries = 1000;

// Alignment of memory, offset and size; no disk asks for more.
int64_t DirectBytes() {
  static const int64_t bytes = std::max<int64_t>(4096, sysconf(_SC_PAGESIZE));
  return bytes;
}

class RealFile : public File {
 public:
  // `flags` are those of open(2), without O_DIRECT.
  static absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path,
                                                    int flags,
                                                    Caching caching) {
    UniqueFd cached(OpenRegularFile(path, flags));
    if (!cached.is_open()) return FileError(errno, "open", path);
    // If this fails, everything goes through the page cache.
    UniqueFd direct(caching == Caching::kCached
                        ? -1
                        : OpenRegularFile(path, flags | O_DIRECT));
    return absl::WrapUnique(
        new RealFile(path, std::move(cached), std::move(direct),
                     /*looks=*/caching == Caching::kDirectUnlessCached));
  }

  absl::Status PRead(int64_t offset, absl::Span<char> out) override {
    const auto wanted = static_cast<int64_t>(out.size());
    const int64_t done = Move(pread, offset, out.data(), wanted,
                              /*past_cache=*/!IsCached(offset, wanted));
    if (done == wanted) return absl::OkStatus();
    if (errno != 0) return FileError(errno, "read", path_);
    return EndsEarly(path_, offset, wanted, done);
  }

  absl::Status PWrite(int64_t offset, absl::Span<const char> bytes) override {
    const FileSizeErrors errors;
    const auto wanted = static_cast<int64_t>(bytes.size());
    const int64_t done =
        Move(pwrite, offset, bytes.data(), wanted, /*past_cache=*/true);
    if (done == wanted) return absl::OkStatus();
    return FileError(errno != 0 ? errno : EIO, "write", path_);
  }

  absl::Status SetSize(int64_t bytes) override {
    const FileSizeErrors errors;
    if (TEMP_FAILURE_RETRY(ftruncate(cached_.get(), bytes)) == 0) {
      return absl::OkStatus();
    }
    return FileError(errno, "set the size of", path_);
  }

  absl::Status Sync() override {
    if (TEMP_FAILURE_RETRY(fdatasync(cached_.get())) == 0) {
      return absl::OkStatus();
    }
    return FileError(errno, "sync", path_);
  }

  absl::StatusOr<int64_t> Size() override {
    struct stat found = {};
    if (fstat(cached_.get(), &found) != 0)
      return FileError(errno, "stat", path_);
    return static_cast<int64_t>(found.st_size);
  }

 private:
  RealFile(std::string path, UniqueFd cached, UniqueFd direct, bool looks)
      : path_(std::move(path)),
        cached_(std::move(cached)),
        direct_(std::move(direct)),
        looks_(looks),
        direct_works_(direct_.is_open()) {}

  // Returns whether the page cache has all of these bytes. Linux tells it the
  // owner of a file; to others it says so of all that they may not write.
  bool IsCached(int64_t offset, int64_t bytes) const {
    struct stat found = {};
    if (!looks_ || !direct_works_ || fstat(cached_.get(), &found) != 0 ||
        (geteuid() != 0 && geteuid() != found.st_uid)) {
      return false;
    }
    // This fails for bytes that do not begin a page.
    void* const mapped =
        mmap(nullptr, bytes, PROT_READ, MAP_SHARED, cached_.get(), offset);
    if (mapped == MAP_FAILED) return false;
    std::vector<unsigned char> pages(bytes / DirectBytes() + 1, 1);
    const bool is_known = mincore(mapped, bytes, pages.data()) == 0;
    munmap(mapped, bytes);
    return is_known &&
           std::all_of(pages.begin(), pages.end(), [](unsigned char page) {
             return (page & 1) != 0;  // the other bits mean nothing
           });
  }

  // MoveAll() by `call`, which is pread(2) or pwrite(2). If `past_cache` is
  // true, whole pages go past the page cache, and what is before and behind
  // them goes through it.
  template <typename Call, typename Byte>
  int64_t Move(Call call, int64_t offset, Byte* memory, int64_t bytes,
               bool past_cache) {
    return MoveAll(bytes, [&](int64_t done) {
      Byte* const rest = memory + done;
      const int64_t at = offset + done;
      int64_t size = bytes - done;
      const int64_t unit = DirectBytes();
      const int64_t before = (unit - at % unit) % unit;  // the first whole page
      const bool is_direct = past_cache && direct_works_ && before == 0 &&
                             size >= unit &&
                             reinterpret_cast<uintptr_t>(rest) % unit == 0;
      if (is_direct) {
        size -= size % unit;
      } else if (past_cache && direct_works_ && before > 0) {
        size = std::min(size, before);
      }
      const ssize_t count =
          call((is_direct ? direct_ : cached_).get(), rest, size, at);
      if (count >= 0 || errno != EINVAL || !is_direct) return count;
      direct_works_ = false;
      return call(cached_.get(), rest, size, at);
    });
  }

  const std::string path_;
  const UniqueFd cached_;
  const UniqueFd direct_;  // may be closed
  const bool looks_;       // for what the page cache has
  // Cleared if the file system takes the flag but refuses direct calls.
  std::atomic<bool> direct_works_;
};

// Returns false while somebody else has the lock.
absl::StatusOr<bool> TryLock(const std::string& path, int descriptor) {
  if (TEMP_FAILURE_RETRY(flock(descriptor, LOCK_EX | LOCK_NB)) == 0)
    return true;
  if (errno == EWOULDBLOCK) return false;
  return FileError(errno, "lock", path);
}

// Returns whether `path` still names the open file.
bool IsAt(const std::string& path, int descriptor) {
  struct stat opened = {};
  struct stat named = {};
  return fstat(descriptor, &opened) == 0 && lstat(path.c_str(), &named) == 0 &&
         opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

absl::Status Held(const std::string& path, int descriptor) {
  char text[kMaxHolderBytes];
  const ssize_t bytes = pread(descriptor, text, sizeof(text), 0);
  const absl::string_view holder = absl::StripAsciiWhitespace(
      absl::string_view(text, std::max<ssize_t>(bytes, 0)));
  return absl::FailedPreconditionError(
      absl::StrCat("lock ", path, ": somebody else has it: ",
                   holder.empty() ? "who does not say who it is" : holder,
                   "; end that run first, or choose another folder"));
}

// Returns -1 and sets errno on an error; `created` tells if it made the file.
int OpenLockFile(const std::string& path, bool* created) {
  constexpr int kFlags = O_RDWR | O_NOFOLLOW | O_CLOEXEC;
  int descriptor = -1;
  // Somebody may remove the file between the two calls.
  for (int tries = 0; descriptor < 0 && tries < kMaxTries; ++tries) {
    descriptor = open(path.c_str(), kFlags | O_CREAT | O_EXCL, 0666);
    *created = descriptor >= 0;
    if (descriptor >= 0 || errno != EEXIST) break;
    descriptor = OpenRegularFile(path, kFlags);
    if (errno != ENOENT) break;
  }
  return descriptor;
}

absl::Status WriteHolder(const std::string& path, int descriptor,
                         absl::string_view holder) {
  const FileSizeErrors errors;
  errno = 0;
  const std::string text =
      absl::StrCat(holder.substr(0, kMaxHolderBytes), "\n");
  const ssize_t count = pwrite(descriptor, text.data(), text.size(), 0);
  if (count != static_cast<ssize_t>(text.size()) ||
      ftruncate(descriptor, static_cast<off_t>(text.size())) != 0) {
    return FileError(errno != 0 ? errno : EIO, "write", path);
  }
  return absl::OkStatus();
}

class Real : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<File>> OpenForReading(
      const std::string& path, Caching caching) override {
    return RealFile::Open(path, O_RDONLY, caching);
  }

  absl::StatusOr<std::unique_ptr<File>> OpenForWriting(
      const std::string& path, Caching caching) override {
    return RealFile::Open(path, O_WRONLY | O_CREAT | O_NOFOLLOW, caching);
  }

  absl::StatusOr<bool> MakeFolder(const std::string& path) override {
    if (mkdir(path.c_str(), 0777) == 0) return true;
    const int error = errno;
    struct stat found = {};
    if (error == EEXIST && stat(path.c_str(), &found) == 0) {
      if (S_ISDIR(found.st_mode)) return false;
      return FileError(ENOTDIR, "make folder", path);
    }
    return FileError(error, "make folder", path);
  }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    if (rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
    const int error = errno == EEXIST ? ENOTEMPTY : errno;
    return FileError(error, absl::StrCat("rename ", from, " to"), to);
  }

  absl::Status RemoveFile(const std::string& path) override {
    if (unlink(path.c_str()) == 0) return absl::OkStatus();
    return FileError(errno, "remove", path);
  }

  absl::Status RemoveFolder(const std::string& path) override {
    if (rmdir(path.c_str()) == 0) return absl::OkStatus();
    const int error = errno == EEXIST ? ENOTEMPTY : errno;
    return FileError(error, "remove folder", path);
  }

  absl::Status SyncFolder(const std::string& path) override {
    const UniqueFd folder(
        open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!folder.is_open()) return FileError(errno, "open folder", path);
    // Some network file systems cannot sync a folder.
    if (TEMP_FAILURE_RETRY(fsync(folder.get())) == 0 || errno == EINVAL) {
      return absl::OkStatus();
    }
    return FileError(errno, "sync folder", path);
  }

  absl::StatusOr<std::vector<std::string>> List(
      const std::string& folder) override {
    DIR* const stream = opendir(folder.c_str());
    if (stream == nullptr) return FileError(errno, "list", folder);
    const std::unique_ptr<DIR, int (*)(DIR*)> closer(stream, closedir);
    std::vector<std::string> names;
    for (;;) {
      errno = 0;
      const dirent* const entry = readdir(stream);  // NOLINT: our own stream
      if (entry == nullptr) break;
      const absl::string_view name = entry->d_name;
      if (name != "." && name != "..") names.emplace_back(name);
    }
    if (errno != 0) return FileError(errno, "list", folder);
    std::sort(names.begin(), names.end());
    return names;
  }

  absl::StatusOr<FileInfo> Stat(const std::string& path) override {
    struct stat found = {};
    if (lstat(path.c_str(), &found) != 0) return FileError(errno, "stat", path);
    if (S_ISDIR(found.st_mode)) return FileInfo{FileInfo::Kind::kFolder, 0};
    if (!S_ISREG(found.st_mode)) return FileInfo{FileInfo::Kind::kOther, 0};
    return FileInfo{FileInfo::Kind::kFile, static_cast<int64_t>(found.st_size)};
  }

  absl::StatusOr<int64_t> FreeBytes(const std::string& folder) override {
    struct statvfs stats = {};
    if (statvfs(folder.c_str(), &stats) != 0) {
      return FileError(errno, "see how much is free in", folder);
    }
    return static_cast<int64_t>(stats.f_bavail) *
           static_cast<int64_t>(stats.f_frsize);
  }

  absl::StatusOr<FileLock> Lock(const std::string& path,
                                absl::string_view holder) override {
    UniqueFd file;
    bool locked = false;
    bool created = false;
    // A holder may remove the file while we open it: a lock of that file would
    // keep nobody out.
    for (int tries = 0; !file.is_open() || !IsAt(path, file.get()); ++tries) {
      if (tries == kMaxTries) {
        return absl::UnavailableError(
            absl::StrCat("lock ", path,
                         ": it is never the file that was opened; choose a "
                         "folder on another file system"));
      }
      file = UniqueFd(OpenLockFile(path, &created));
      if (!file.is_open()) return FileError(errno, "open", path);
      FSDP_ASSIGN_OR_RETURN(locked, TryLock(path, file.get()));
    }
    if (!locked) return Held(path, file.get());
    absl::Status written = WriteHolder(path, file.get(), holder);
    if (!written.ok()) {
      // Nobody else can have locked it yet.
      if (created) unlink(path.c_str());
      return written;
    }
    // The lock goes when its descriptor is closed, also by the end of the
    // process.
    return std::make_shared<UniqueFd>(std::move(file));
  }
};

}  // namespace

FileSystem& RealFileSystem() {
  static Real* const files = new Real;
  return *files;
}

FileSystem& OrReal(FileSystem* files) {
  return files == nullptr ? RealFileSystem() : *files;
}

}  // namespace fsdp
