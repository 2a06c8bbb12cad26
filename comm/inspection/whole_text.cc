#include "comm/inspection/whole_text.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"

namespace fsdp::comm {
namespace {

// Whether all of it is written.
bool WriteAll(int fd, absl::string_view text) {
  while (!text.empty()) {
    const ssize_t count = write(fd, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    text.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

}  // namespace

void WriteWhole(int fd, absl::string_view text) { WriteAll(fd, text); }

absl::Status AppendWhole(const std::string& path, absl::string_view text) {
  const int fd =
      open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0) {
    return absl::ErrnoToStatus(
        errno, absl::StrCat("cannot write what the ranks do to ", path));
  }
  const bool is_written = WriteAll(fd, text);
  const int error = errno;
  close(fd);
  if (is_written) return absl::OkStatus();
  return absl::ErrnoToStatus(
      error, absl::StrCat("cannot write what the ranks do to ", path));
}

std::string InspectionFile(const std::string& folder, int rank) {
  return absl::StrCat(folder, "/rank-", rank, ".txt");
}

}  // namespace fsdp::comm
