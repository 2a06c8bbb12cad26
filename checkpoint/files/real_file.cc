#include "checkpoint/files/real_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/memory/memory.h"
#include "base/file_size_errors.h"
#include "base/regular_file.h"
#include "checkpoint/files/file_error.h"
#include "checkpoint/files/move_all.h"

namespace fsdp::checkpoint {
namespace {

// Of memory, offset and size; no disk asks for more.
int64_t DirectBytes() {
  static const int64_t bytes = std::max<int64_t>(4096, sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace

RealFile::RealFile(std::string path, int cached, int direct)
    : path_(std::move(path)),
      cached_(cached),
      direct_(direct),
      direct_works_(direct >= 0) {}

RealFile::~RealFile() {
  close(cached_);
  if (direct_ >= 0) close(direct_);
}

absl::StatusOr<std::unique_ptr<File>> RealFile::Open(const std::string& path,
                                                     int flags,
                                                     Caching caching) {
  const int cached = OpenRegularFile(path, flags);
  if (cached < 0) return FileError(errno, "open", path);
  // Without it, all goes through the cache.
  const int direct = caching == Caching::kDirect
                         ? OpenRegularFile(path, flags | O_DIRECT)
                         : -1;
  return absl::WrapUnique(new RealFile(path, cached, direct));
}

int64_t RealFile::direct_bytes() const {
  return direct_works_.load(std::memory_order_relaxed) ? DirectBytes() : 0;
}

int RealFile::DescriptorFor(int64_t offset, const char* memory,
                            int64_t bytes) const {
  const int64_t unit = direct_bytes();
  if (unit == 0 || bytes == 0) return cached_;
  const auto address =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory));
  return (offset | address | bytes) % unit == 0 ? direct_ : cached_;
}

absl::Status RealFile::PRead(int64_t offset, absl::Span<char> out) {
  const auto wanted = static_cast<int64_t>(out.size());
  const int64_t done = MoveAll(wanted, [&](int64_t done) {
    char* const rest = out.data() + done;
    const int descriptor = DescriptorFor(offset + done, rest, wanted - done);
    const ssize_t count = pread(descriptor, rest, wanted - done, offset + done);
    if (count >= 0 || errno != EINVAL || descriptor == cached_) return count;
    direct_works_ = false;
    return pread(cached_, rest, wanted - done, offset + done);
  });
  if (done == wanted) return absl::OkStatus();
  if (errno != 0) return FileError(errno, "read", path_);
  return EndsEarly(path_, offset, wanted, done);
}

absl::Status RealFile::PWrite(int64_t offset, absl::Span<const char> bytes) {
  const FileSizeErrors errors;
  const auto wanted = static_cast<int64_t>(bytes.size());
  const int64_t done = MoveAll(wanted, [&](int64_t done) {
    const char* const rest = bytes.data() + done;
    const int descriptor = DescriptorFor(offset + done, rest, wanted - done);
    const ssize_t count =
        pwrite(descriptor, rest, wanted - done, offset + done);
    if (count >= 0 || errno != EINVAL || descriptor == cached_) return count;
    direct_works_ = false;
    return pwrite(cached_, rest, wanted - done, offset + done);
  });
  if (done == wanted) return absl::OkStatus();
  return FileError(errno != 0 ? errno : EIO, "write", path_);
}

absl::Status RealFile::SetSize(int64_t bytes) {
  const FileSizeErrors errors;
  while (ftruncate(cached_, bytes) != 0) {
    if (errno != EINTR) return FileError(errno, "set the size of", path_);
  }
  return absl::OkStatus();
}

absl::Status RealFile::Sync() {
  while (fdatasync(cached_) != 0) {
    if (errno != EINTR) return FileError(errno, "sync", path_);
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> RealFile::Size() {
  struct stat found = {};
  if (fstat(cached_, &found) != 0) return FileError(errno, "stat", path_);
  return static_cast<int64_t>(found.st_size);
}

}  // namespace fsdp::checkpoint
