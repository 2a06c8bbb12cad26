// Helpers for tests of the launcher: a FIFO, and a launcher in a process of its
// own.
#ifndef COMM_TESTING_LAUNCHER_PROCESSES_H_
#define COMM_TESTING_LAUNCHER_PROCESSES_H_

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/testing/this_program.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/testing/launcher_roles.h"
#include "gtest/gtest.h"

namespace fsdp::comm {

// Tests wait no longer than this for something that is due at once.
inline constexpr absl::Duration kLimit = absl::Seconds(20);

// A FIFO by which processes notice each other's end.
class Fifo {
 public:
  Fifo() : path_(absl::StrCat(::testing::TempDir(), "/fifo.", getpid())) {
    unlink(path_.c_str());
    FSDP_CHECK(mkfifo(path_.c_str(), 0600) == 0);
  }
  ~Fifo() { unlink(path_.c_str()); }

  const std::string& path() const { return path_; }

  // Opens it for reading, so that writers need not wait for another reader.
  void Watch() {
    fd_.Reset(open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  }

  // Returns true once all that have opened it for writing since Watch() are
  // gone, or false if that takes longer than kLimit.
  bool WriterIsGone() const {
    pollfd state = {fd_.get(), 0, 0};
    return poll(&state, 1,
                static_cast<int>(absl::ToInt64Milliseconds(kLimit))) == 1 &&
           (state.revents & POLLHUP) != 0;
  }

 private:
  std::string path_;
  UniqueFd fd_;
};

inline std::string ReadAll(int fd) {
  std::string text;
  char buffer[4096];
  lseek(fd, 0, SEEK_SET);
  for (ssize_t count; (count = read(fd, buffer, sizeof(buffer))) > 0;) {
    text.append(buffer, static_cast<size_t>(count));
  }
  return text;
}

// Runs this program as a launcher of two ranks, in a process of its own.
class LauncherProcess : public ::fsdp::testing::ChildProcess {
 public:
  // `more` has further variables, "A=b C=d".
  explicit LauncherProcess(const std::string& role, absl::string_view more = "")
      : ChildProcess(absl::StrCat("env ", kRole, "=launch_two ", kNestedRole,
                                  "=", role, " ", more, " '",
                                  ::fsdp::testing::ProgramPath(), "'")) {}
};

}  // namespace fsdp::comm

#endif  // COMM_TESTING_LAUNCHER_PROCESSES_H_
