#include "comm/launcher/processes/signal_queue.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace fsdp::comm {
namespace {

bool IsIgnored(int signal) {
  struct sigaction action = {};
  return sigaction(signal, nullptr, &action) == 0 &&
         action.sa_handler == SIG_IGN;
}

bool HasHandler(int signal) {
  struct sigaction action = {};
  sigaction(signal, nullptr, &action);
  return (action.sa_flags & SA_SIGINFO) != 0 ||
         (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN);
}

}  // namespace

absl::StatusOr<SignalQueue> SignalQueue::Create() {
  SignalQueue queue;
  sigset_t handled;
  sigemptyset(&handled);
  sigemptyset(&queue.questions_);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGTSTP}) {
    if (!IsIgnored(signal)) sigaddset(&handled, signal);
  }
  for (int signal : {SIGQUIT, SIGUSR1}) {
    if (HasHandler(signal)) continue;
    sigaddset(&handled, signal);
    sigaddset(&queue.questions_, signal);
  }
  sigaddset(&handled, SIGCHLD);
  // Ignored, it would keep from us how children end.
  struct sigaction by_default = {};
  by_default.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &by_default, &queue.previous_child_);
  pthread_sigmask(SIG_BLOCK, &handled, &queue.previous_);
  queue.fd_.Reset(signalfd(-1, &handled, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!queue.fd_.is_open()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot make a signalfd: ", std::strerror(errno)));
  }
  return queue;
}

SignalQueue::SignalQueue(SignalQueue&& other) noexcept
    : fd_(std::move(other.fd_)),
      questions_(other.questions_),
      previous_(other.previous_),
      previous_child_(other.previous_child_),
      restores_(std::exchange(other.restores_, false)) {}

SignalQueue::~SignalQueue() {
  if (!restores_) return;
  // Questions that nobody is left to answer would end the process.
  const timespec at_once = {};
  while (sigtimedwait(&questions_, nullptr, &at_once) > 0) {
  }
  pthread_sigmask(SIG_SETMASK, &previous_, nullptr);
  sigaction(SIGCHLD, &previous_child_, nullptr);
}

int SignalQueue::Next() {
  signalfd_siginfo info;
  if (read(fd_.get(), &info, sizeof(info)) != sizeof(info)) return 0;
  return static_cast<int>(info.ssi_signo);
}

}  // namespace fsdp::comm
