#include "comm/inspection/whole_text.h"

#include <fcntl.h>
#include <sys/stat.h>
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

absl::Status AppendForRank(const std::string& folder, int rank,
                           absl::string_view text) {
  const std::string path = absl::StrCat(folder, "/rank-", rank, ".txt");
  const auto error = [&path](int number) {
    return absl::ErrnoToStatus(
        number, absl::StrCat("cannot write what the ranks do to ", path));
  };
  mkdir(folder.c_str(), 0755);  // what is there already stays
  const int fd =
      open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0) return error(errno);
  const bool is_written = WriteAll(fd, text);
  const int number = errno;
  close(fd);
  return is_written ? absl::OkStatus() : error(number);
}

}  // namespace fsdp::comm
