#include "comm/host/peer_process.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace fsdp::comm {
namespace {

// Returns the fields of /proc/PID/stat that follow the name, which may contain
// spaces, or none if there is no such process.
std::vector<std::string> StatFields(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  const std::string text((std::istreambuf_iterator<char>(file)),
                         std::istreambuf_iterator<char>());
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 2 > text.size()) return {};
  return absl::StrSplit(text.substr(name_end + 2), ' ');
}

// Returns "R", "S", "T", "Z" or the like, or "" if there is no such process.
std::string State(pid_t pid) {
  const std::vector<std::string> fields = StatFields(pid);
  return fields.empty() ? "" : fields[0];
}

std::string StartTime(pid_t pid) {
  constexpr size_t kStartTime = 19;  // field 22 of the file
  const std::vector<std::string> fields = StatFields(pid);
  return fields.size() > kStartTime ? fields[kStartTime] : "";
}

int OpenDescriptor(pid_t pid) {
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
}

}  // namespace

PeerProcess::PeerProcess(pid_t pid)
    : pid_(pid),
      is_self_(pid == getpid()),
      descriptor_(is_self_ ? -1 : OpenDescriptor(pid)),
      started_(StartTime(pid)) {}

PeerProcess::~PeerProcess() {
  if (descriptor_ >= 0) close(descriptor_);
}

bool PeerProcess::HasEnded() const {
  if (is_self_) return false;
  if (descriptor_ >= 0) {
    pollfd ended = {descriptor_, POLLIN, 0};
    return poll(&ended, 1, 0) == 1;
  }
  const std::string state = State(pid_);
  return state.empty() || state == "Z" || state == "X" ||
         StartTime(pid_) != started_;
}

std::string PeerProcess::Describe() const {
  const std::string name = absl::StrCat("process ", pid_);
  if (HasEnded()) return absl::StrCat(name, " has ended");
  const std::string state = State(pid_);
  const bool is_stopped = state == "T" || state == "t";
  return absl::StrCat(name, is_stopped ? " is stopped" : " runs");
}

}  // namespace fsdp::comm
