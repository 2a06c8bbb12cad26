#include "comm/host/shared_segment.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/control_groups.h"
#include "base/output_file.h"

namespace fsdp::comm {
namespace {

absl::Status Error(int error, absl::string_view what) {
  const bool is_full =
      error == ENOMEM || error == ENOSPC || error == EMFILE || error == ENFILE;
  if (error == EFBIG) {
    return absl::ResourceExhaustedError(absl::StrCat(
        what,
        ": the limit on the size of files (ulimit -f) holds for it, too; "
        "raise that"));
  }
  const absl::Status status = absl::ErrnoToStatus(error, what);
  if (is_full) return absl::ResourceExhaustedError(status.message());
  return absl::UnavailableError(status.message());
}

// Even an empty segment has an address.
size_t MappedBytes(int64_t bytes) {
  return static_cast<size_t>(std::max<int64_t>(bytes, 1));
}

absl::StatusOr<char*> Map(int descriptor, int64_t bytes) {
  void* data = mmap(nullptr, MappedBytes(bytes), PROT_READ | PROT_WRITE,
                    MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) {
    return Error(errno, absl::StrCat("map ", bytes, " bytes of shared memory"));
  }
  // This is a hint, which systems without huge pages for shared memory refuse.
  madvise(data, MappedBytes(bytes), MADV_HUGEPAGE);
  return static_cast<char*>(data);
}

// Two of the fields of /proc/PID/stat that follow the name.
constexpr size_t kState = 0;       // "R", "S", "T", "Z" or the like
constexpr size_t kStartTime = 19;  // field 22 of the file

// Returns such a field, or "" if there is no such process.
std::string StatField(pid_t pid, size_t number) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string text;  // empty also if the process ends between open and read
  std::getline(file, text, '\0');
  const size_t name_end = text.rfind(')');  // it may contain spaces
  if (name_end == std::string::npos || name_end + 2 > text.size()) return "";
  const std::vector<std::string> fields =
      absl::StrSplit(text.substr(name_end + 2), ' ');
  return fields.size() > number ? fields[number] : "";
}

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// Returns the number in a file; kUnlimited for "max" or no such file.
int64_t NumberIn(const std::string& path) {
  int64_t number = 0;
  return std::ifstream(path) >> number ? number : kUnlimited;
}

// Returns how much of its limit a control group has left.
int64_t LeftIn(const ControlGroup& group) {
  const bool v2 = group.is_version_2;
  const std::string name = absl::StrCat(group.folder, "/memory.");
  const int64_t limit = NumberIn(name + (v2 ? "max" : "limit_in_bytes"));
  const int64_t used = NumberIn(name + (v2 ? "current" : "usage_in_bytes"));
  if (limit == kUnlimited || used == kUnlimited) return kUnlimited;
  // With that of the groups inside.
  const int64_t cached =
      NumberAfter(v2 ? "inactive_file " : "total_inactive_file ", name + "stat",
                  /*otherwise=*/0);
  return std::max<int64_t>(0, limit - std::max<int64_t>(0, used - cached));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedSegment>> SharedSegment::Create(
    int64_t bytes) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot allocate ", bytes, " bytes"));
  }
  const std::string what =
      absl::StrCat("allocate ", bytes, " bytes of shared memory");
  // The kernel promises any amount, and ends a process when it cannot keep its
  // word.
  const int64_t available = AvailableMemory();
  if (bytes > available) {
    return absl::ResourceExhaustedError(
        absl::StrCat(what, ": ", available, " are available"));
  }
  const FileSizeErrors errors;
  UniqueFd descriptor(memfd_create("libtorch_fsdp", MFD_CLOEXEC));
  if (descriptor.get() < 0) return Error(errno, what);
  if (ftruncate(descriptor.get(), static_cast<off_t>(MappedBytes(bytes))) !=
      0) {
    return Error(errno, what);
  }
  struct stat status;
  if (fstat(descriptor.get(), &status) != 0) return Error(errno, what);
  absl::StatusOr<char*> data = Map(descriptor.get(), bytes);
  if (!data.ok()) return data.status();
  SegmentAddress address;
  address.pid = getpid();
  address.descriptor = descriptor.get();
  address.device = status.st_dev;
  address.inode = status.st_ino;
  address.bytes = bytes;
  return std::unique_ptr<SharedSegment>(
      new SharedSegment(address, descriptor.Release(), *data));
}

absl::StatusOr<std::unique_ptr<SharedSegment>> SharedSegment::Open(
    const SegmentAddress& address) {
  const std::string what =
      absl::StrCat("open ", address.bytes,
                   " bytes of shared memory of process ", address.pid);
  if (address.pid <= 0 || address.descriptor < 0 || address.bytes < 0) {
    return absl::UnavailableError(absl::StrCat(what, ": that is nowhere"));
  }
  const std::string path =
      absl::StrCat("/proc/", address.pid, "/fd/", address.descriptor);
  UniqueFd descriptor(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (descriptor.get() < 0) return Error(errno, what);
  struct stat status;
  if (fstat(descriptor.get(), &status) != 0) return Error(errno, what);
  if (status.st_dev != address.device || status.st_ino != address.inode) {
    return absl::UnavailableError(
        absl::StrCat(what, ": the process has given it back"));
  }
  if (!S_ISREG(status.st_mode) || status.st_uid != geteuid()) {
    return absl::UnavailableError(absl::StrCat(
        what, ": it is no memory, or belongs to user ", status.st_uid));
  }
  // An access beyond the end of the file would end this process.
  if (static_cast<size_t>(status.st_size) < MappedBytes(address.bytes)) {
    return absl::UnavailableError(
        absl::StrCat(what, ": there are ", status.st_size));
  }
  absl::StatusOr<char*> data = Map(descriptor.get(), address.bytes);
  if (!data.ok()) return data.status();
  SegmentAddress own = address;
  own.pid = getpid();
  own.descriptor = descriptor.get();
  return std::unique_ptr<SharedSegment>(
      new SharedSegment(own, descriptor.Release(), *data));
}

SharedSegment::~SharedSegment() {
  munmap(data_, MappedBytes(bytes()));
  Seal();
}

void SharedSegment::Seal() {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

int64_t NumberAfter(absl::string_view key, const std::string& path,
                    int64_t otherwise) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    absl::string_view text = line;
    int64_t number = 0;
    if (absl::ConsumePrefix(&text, key) &&
        absl::SimpleAtoi(absl::StripSuffix(text, " kB"), &number)) {
      return number;
    }
  }
  return otherwise;
}

int64_t AvailableMemory(const std::string& root) {
  const int64_t kilobytes =
      NumberAfter("MemAvailable:", root + "/proc/meminfo", kUnlimited / 1024);
  int64_t available =
      kilobytes == kUnlimited / 1024 ? kUnlimited : kilobytes * 1024;
  for (const ControlGroup& group : ControlGroups("memory", root)) {
    available = std::min(available, LeftIn(group));
  }
  return available;
}

std::string HostIdentity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char processes[64] = "";
  const ssize_t size =
      readlink("/proc/self/ns/pid", processes, sizeof(processes) - 1);
  return absl::StrCat(boot, "/",
                      absl::string_view(processes, size > 0 ? size : 0));
}

PeerProcess::PeerProcess(pid_t pid)
    : pid_(pid),
      is_self_(pid == getpid()),
      descriptor_(is_self_ ? -1
                           : static_cast<int>(syscall(SYS_pidfd_open, pid, 0))),
      started_(StatField(pid, kStartTime)) {}

PeerProcess::~PeerProcess() {
  if (descriptor_ >= 0) close(descriptor_);
}

bool PeerProcess::HasEnded() const {
  if (is_self_) return false;
  if (descriptor_ >= 0) {
    pollfd ended = {descriptor_, POLLIN, 0};
    return poll(&ended, 1, 0) == 1;
  }
  const std::string state = StatField(pid_, kState);
  return state.empty() || state == "Z" || state == "X" ||
         StatField(pid_, kStartTime) != started_;
}

std::string PeerProcess::Describe() const {
  const std::string name = absl::StrCat("process ", pid_);
  if (HasEnded()) return absl::StrCat(name, " has ended");
  const std::string state = StatField(pid_, kState);
  const bool is_stopped = state == "T" || state == "t";
  return absl::StrCat(name, is_stopped ? " is stopped" : " runs");
}

}  // namespace fsdp::comm
