// One rank, or one part of a launcher, as a child process.
#ifndef COMM_LAUNCHER_CHILD_PROCESS_H_
#define COMM_LAUNCHER_CHILD_PROCESS_H_

#include <signal.h>
#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/launcher/launch_options.h"
#include "comm/startup/bootstrap_socket.h"

namespace fsdp::comm {

// Opens those standard streams that this process lacks. Otherwise its first
// pipes would take their descriptors.
absl::Status OpenStandardStreams();

// A running process that leads a process group of its own and dies with the
// thread that started it. The destructor kills and reaps it.
class ChildProcess {
 public:
  struct Options {
    std::string program;                   // path
    std::vector<std::string> argv;         // argv[0] included
    std::vector<std::string> environment;  // "NAME=value"
    int inherited_fd = -1;                 // stays open in the child; -1: none
  };

  // Starts a program by fork and exec; this process has one thread only. The
  // child's standard input is empty. It begins with SIGQUIT and SIGUSR1
  // ignored, and SIGUSR1 also blocked, so that none is lost: a StopRequest and
  // InspectionSignals unblock it. FailedPrecondition: the program cannot be
  // run. ResourceExhausted: no pipe or process is left.
  static absl::StatusOr<ChildProcess> Start(const Options& options);

  // Forks this process, which has one thread only. The child calls `run` and
  // exits with what that returns. It has this process's signal mask, handlers
  // and open files; its standard streams are those of Start().
  static absl::StatusOr<ChildProcess> Fork(const std::function<int()>& run);

  ChildProcess(ChildProcess&& other) noexcept
      : pid_(std::exchange(other.pid_, 0)),
        stdout_(std::move(other.stdout_)),
        stderr_(std::move(other.stderr_)) {}
  ChildProcess& operator=(ChildProcess&&) = delete;
  ~ChildProcess();

  pid_t pid() const { return pid_; }  // 0: reaped

  // The reading ends of its standard output and error. They do not block.
  int stdout_fd() const { return stdout_.get(); }
  int stderr_fd() const { return stderr_.get(); }

  // Sends `signal` to the process and what it has started, unless it has been
  // reaped.
  void Signal(int signal) const;
  // Sends `signal` to the process alone.
  void SignalAlone(int signal) const;

  // Returns how the process ended, once it has, and kills what is left of its
  // group. Never blocks.
  std::optional<ProcessEnd> TryReap();

  // True if a signal has stopped it since the last call. Never blocks.
  bool HasStopped() const;

 private:
  ChildProcess(pid_t pid, UniqueFd stdout_fd, UniqueFd stderr_fd);

  pid_t pid_;  // 0: reaped, or moved from
  UniqueFd stdout_;
  UniqueFd stderr_;
};

// Receives the signals to a launcher by a descriptor that poll() can wait for:
//   SIGINT, SIGTERM, SIGHUP, SIGTSTP  unless the process ignores them, as under
//                                     nohup
//   SIGQUIT, SIGUSR1                  unless the process has a handler; also
//                                     when they are ignored, as in shells'
//                                     background jobs
//   SIGCHLD                           always
// The destructor restores what was before. Signals that have come and were not
// taken are delivered then, except SIGQUIT and SIGUSR1. Make it while the
// process has one thread.
class SignalQueue {
 public:
  // ResourceExhausted: no descriptor is left.
  static absl::StatusOr<SignalQueue> Create();

  SignalQueue(SignalQueue&& other) noexcept;
  SignalQueue& operator=(SignalQueue&&) = delete;
  ~SignalQueue();

  // Becomes readable when a signal has come.
  int fd() const { return fd_.get(); }

  // Returns the next signal that has come, or 0.
  int Next();

 private:
  SignalQueue() = default;

  UniqueFd fd_;
  sigset_t questions_ = {};  // SIGQUIT and SIGUSR1, where they are handled
  sigset_t previous_ = {};
  struct sigaction previous_child_ = {};
  bool restores_ = true;
};

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_CHILD_PROCESS_H_
