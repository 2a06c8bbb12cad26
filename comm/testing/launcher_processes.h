// Helpers for tests of the launcher: a FIFO, and a launcher in a process of its
// own.
#ifndef COMM_TESTING_LAUNCHER_PROCESSES_H_
#define COMM_TESTING_LAUNCHER_PROCESSES_H_

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "comm/launcher/child_process.h"
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

// Runs this program as a launcher, for example of two ranks, in a process of
// its own.
class LauncherProcess {
 public:
  // `environment` has "NAME=value" and tells the program that it is a launcher.
  explicit LauncherProcess(std::vector<std::string> environment) {
    Start(std::move(environment));
  }

  explicit LauncherProcess(const std::string& role,
                           const std::string& fifo = "", int ignored_signal = 0,
                           int max_restarts = 0) {
    std::vector<std::string> environment = {
        absl::StrCat(kRole, "=launch_two"),
        absl::StrCat(kNestedRole, "=", role), absl::StrCat(kFifo, "=", fifo),
        absl::StrCat(kIgnoredSignal, "=", ignored_signal)};
    if (max_restarts > 0) {
      environment.push_back(absl::StrCat(kMaxRestarts, "=", max_restarts));
    }
    Start(std::move(environment));
  }

  ChildProcess& process() { return *process_; }

  // Reads output until `count` lines contain `text`. Returns false if they do
  // not come.
  bool WaitForLines(absl::string_view text, int count) {
    const absl::Time deadline = absl::Now() + kLimit;
    while (absl::Now() < deadline) {
      const std::vector<std::string> lines = absl::StrSplit(output_, text);
      if (static_cast<int>(lines.size()) > count) return true;
      if (!ReadMore(deadline)) return false;
    }
    return false;
  }

  // Reads the launcher's output to its end and returns how it has ended.
  std::optional<ProcessEnd> WaitForEnd() {
    while (ReadMore(absl::Now() + kLimit)) {
    }
    // The pipe closes just before the process can be reaped.
    return WaitForEndUnread();
  }

  // Does the same without reading any output.
  std::optional<ProcessEnd> WaitForEndUnread() {
    const absl::Time deadline = absl::Now() + kLimit;
    while (absl::Now() < deadline) {
      if (auto end = process_->TryReap(); end.has_value()) return end;
    }
    return std::nullopt;
  }

  const std::string& output() const { return output_; }

 private:
  void Start(std::vector<std::string> environment) {
    ChildProcess::Options options;
    options.program = "/proc/self/exe";
    options.argv = {"launcher_test"};
    options.environment = std::move(environment);
    process_.emplace(*ChildProcess::Start(options));
  }

  bool ReadMore(absl::Time deadline) {
    pollfd ready = {process_->stdout_fd(), POLLIN, 0};
    const int64_t left = absl::ToInt64Milliseconds(deadline - absl::Now());
    if (left <= 0 || poll(&ready, 1, static_cast<int>(left)) <= 0) return false;
    char buffer[4096];
    const ssize_t count = read(ready.fd, buffer, sizeof(buffer));
    if (count <= 0) return false;
    output_.append(buffer, static_cast<size_t>(count));
    return true;
  }

  std::optional<ChildProcess> process_;
  std::string output_;
};

}  // namespace fsdp::comm

#endif  // COMM_TESTING_LAUNCHER_PROCESSES_H_
