// One rank, or one part of a launcher, as a child process.
#ifndef COMM_LAUNCHER_PROCESSES_CHILD_PROCESS_H_
#define COMM_LAUNCHER_PROCESSES_CHILD_PROCESS_H_

#include <signal.h>
#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/launcher/processes/process_end.h"
#include "comm/startup/bootstrap_socket.h"

namespace fsdp::comm {

// Opens standard streams that this process does not have: it would get them as
// the first pipes.
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

  // Its standard input is empty. It ignores SIGQUIT and SIGUSR1 until it has
  // decided what they are for, and has the latter blocked, so that none is
  // lost: a StopRequest and InspectionSignals unblock it. Only for processes of
  // one thread: the child is made by fork.
  static absl::StatusOr<ChildProcess> Start(const Options& options);

  // A copy of this process that does nothing but `run`, and exits with what
  // that returns. It has this process's signal mask and handlers, and what it
  // has open; its standard streams are those of Start(). Only for processes of
  // one thread.
  static absl::StatusOr<ChildProcess> Fork(const std::function<int()>& run);

  ChildProcess(ChildProcess&& other) noexcept = default;
  ChildProcess& operator=(ChildProcess&&) = delete;
  ~ChildProcess();

  pid_t pid() const { return pid_.get(); }  // 0: reaped

  // The reading ends of its standard output and error; non-blocking.
  int stdout_fd() const { return stdout_.get(); }
  int stderr_fd() const { return stderr_.get(); }

  // Sends `signal` to the process and what it has started. No effect once it
  // has been reaped.
  void Signal(int signal) const;
  // To the process alone.
  void SignalAlone(int signal) const;

  // How the process ended, once it has; kills what is left of its group. Never
  // blocks.
  std::optional<ProcessEnd> TryReap();

  // Whether it has been stopped since the last call. Never blocks.
  bool HasStopped() const;

 private:
  // A process id that a move leaves behind.
  class Pid {
   public:
    explicit Pid(pid_t pid) : pid_(pid) {}
    Pid(Pid&& other) noexcept : pid_(std::exchange(other.pid_, 0)) {}
    pid_t get() const { return pid_; }
    void Clear() { pid_ = 0; }

   private:
    pid_t pid_;
  };

  ChildProcess(pid_t pid, UniqueFd stdout_fd, UniqueFd stderr_fd);

  Pid pid_;  // 0: reaped
  UniqueFd stdout_;
  UniqueFd stderr_;
};

// Signals to a launcher as something that poll() can wait for.

// Puts SIGINT, SIGTERM, SIGHUP, SIGTSTP and SIGCHLD in the way of a descriptor
// instead of a handler; the destructor restores what was, and what has come and
// was not taken comes then, but for SIGQUIT and SIGUSR1. What the process
// ignores, as under nohup, it goes on ignoring: a blocked signal would come in
// spite of that. SIGQUIT and SIGUSR1, too, but those also when they are
// ignored, as shells have it for what runs in the background, and not when the
// process has a handler. To be made while the process has one thread.
class SignalQueue {
 public:
  // ResourceExhausted: no descriptor is left.
  static absl::StatusOr<SignalQueue> Create();

  SignalQueue(SignalQueue&& other) noexcept;
  SignalQueue& operator=(SignalQueue&&) = delete;
  ~SignalQueue();

  // Readable when a signal has come.
  int fd() const { return fd_.get(); }

  // The next signal that has come; 0: none.
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

#endif  // COMM_LAUNCHER_PROCESSES_CHILD_PROCESS_H_
