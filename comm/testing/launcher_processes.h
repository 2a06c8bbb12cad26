// Helpers for tests of the launcher: the roles of processes that it starts, a
// FIFO, and a launcher in a process of its own.
#ifndef COMM_TESTING_LAUNCHER_PROCESSES_H_
#define COMM_TESTING_LAUNCHER_PROCESSES_H_

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/testing/this_program.h"
#include "comm/startup/bootstrap_socket.h"
#include "gtest/gtest.h"

namespace fsdp::comm {

// Environment variables, in this order: the role of a process; the role of the
// ranks of a process that is a launcher itself; the path of a FIFO; a signal
// that a launcher ignores from its start; how often a launcher restarts its
// ranks, after a pause of an hour each, by default never.
inline constexpr char kRole[] = "LAUNCHER_TEST_ROLE";
inline constexpr char kNestedRole[] = "LAUNCHER_TEST_NESTED_ROLE";
inline constexpr char kFifo[] = "LAUNCHER_TEST_FIFO";
inline constexpr char kIgnoredSignal[] = "LAUNCHER_TEST_IGNORED_SIGNAL";
inline constexpr char kMaxRestarts[] = "LAUNCHER_TEST_MAX_RESTARTS";

// "print_much" prints this many lines of this many bytes.
inline constexpr int kLines = 1000;
inline constexpr int kLineBytes = 1000;

// Plays this process's role and returns its exit code. Returns nullopt in the
// test itself, which has no role.
std::optional<int> PlayRole();

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
