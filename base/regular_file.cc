#include "base/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace fsdp {
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

absl::StatusOr<int> OpenToRead(const std::string& path) {
  const int descriptor = OpenRegularFile(path, O_RDONLY);
  if (descriptor >= 0) return descriptor;
  const std::string what = absl::StrCat("reading ", path);
  if (errno != ENXIO && errno != EISDIR) {
    return absl::ErrnoToStatus(errno, what);
  }
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": it is no regular file"));
}

absl::StatusOr<std::string> ReadRegularFile(const std::string& path) {
  constexpr size_t kMaxBytes = size_t{1} << 30;
  FSDP_ASSIGN_OR_RETURN(const int descriptor, OpenToRead(path));
  const auto close_it = absl::MakeCleanup([descriptor] { close(descriptor); });
  std::string text;
  std::array<char, 1 << 16> block;
  ssize_t count = 0;
  while ((count = read(descriptor, block.data(), block.size())) > 0) {
    text.append(block.data(), count);
    if (text.size() <= kMaxBytes) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("reading ", path, ": it has more than a GiB"));
  }
  if (count == 0) return text;
  return absl::ErrnoToStatus(errno, absl::StrCat("reading ", path));
}

}  // namespace fsdp
