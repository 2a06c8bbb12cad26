// Signals to a launcher as something that poll() can wait for.
#ifndef COMM_LAUNCHER_PROCESSES_SIGNAL_QUEUE_H_
#define COMM_LAUNCHER_PROCESSES_SIGNAL_QUEUE_H_

#include <signal.h>

#include "absl/status/statusor.h"
#include "comm/startup/bootstrap_fd.h"

namespace fsdp::comm {

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

#endif  // COMM_LAUNCHER_PROCESSES_SIGNAL_QUEUE_H_
