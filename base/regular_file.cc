#include "base/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace fsdp {
namespace {

constexpr size_t kReadBytes = size_t{1} << 20;

}  // namespace

int OpenRegularFile(const std::string& path, int flags) {
  int descriptor = -1;
  do {
    descriptor = open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK, 0666);
  } while (descriptor < 0 && errno == EINTR);
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

absl::StatusOr<std::string> ReadRegularFile(const std::string& path,
                                            int64_t max_bytes) {
  const int descriptor = OpenRegularFile(path, O_RDONLY);
  if (descriptor < 0 && (errno == ENXIO || errno == EISDIR)) {
    return absl::InvalidArgumentError(
        absl::StrCat("reading ", path, ": it is no regular file"));
  }
  const auto error = [&path] {
    return absl::ErrnoToStatus(errno, absl::StrCat("reading ", path));
  };
  if (descriptor < 0) return error();
  const auto close_it = absl::MakeCleanup([descriptor] { close(descriptor); });
  std::string text;
  for (;;) {
    const size_t have = text.size();
    if (have > static_cast<size_t>(max_bytes)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "reading ", path, ": it has more than ", max_bytes, " bytes"));
    }
    text.resize(have + kReadBytes);
    const ssize_t count = read(descriptor, &text[have], kReadBytes);
    if (count < 0 && errno != EINTR) return error();
    text.resize(have + std::max<ssize_t>(count, 0));
    if (count == 0) return text;
  }
}

}  // namespace fsdp
