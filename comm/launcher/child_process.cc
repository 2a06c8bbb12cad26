#include "comm/launcher/child_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace fsdp::comm {
namespace {

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};

absl::StatusOr<Pipe> MakePipe() {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot make a pipe: ", std::strerror(errno)));
  }
  return Pipe{UniqueFd(fds[0]), UniqueFd(fds[1])};
}

std::vector<char*> Pointers(const std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  pointers.reserve(strings.size() + 1);
  for (const std::string& string : strings) {
    pointers.push_back(const_cast<char*>(string.c_str()));
  }
  pointers.push_back(nullptr);
  return pointers;
}

// Makes this new process what ChildProcess says; returns whether that worked.
bool BecomeChild(pid_t launcher, int stdout_fd, int stderr_fd) {
  setpgid(0, 0);
  const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  return prctl(PR_SET_PDEATHSIG, SIGKILL) == 0 && null >= 0 &&
         dup2(null, STDIN_FILENO) >= 0 && dup2(stdout_fd, STDOUT_FILENO) >= 0 &&
         dup2(stderr_fd, STDERR_FILENO) >= 0 &&
         // The launcher may have died before prctl.
         getppid() == launcher;
}

// Becomes a child that runs options.program. All else that it needs was made
// before the fork: between fork and exec only async-signal-safe calls are
// allowed. `error_fd` receives errno if the program cannot be started.
[[noreturn]] void Exec(const ChildProcess::Options& options, char* const* argv,
                       char* const* environment, pid_t launcher, int stdout_fd,
                       int stderr_fd, int error_fd) {
  // A rank may be asked what it is doing, or told to stop, before it can
  // answer. It ignores SIGQUIT until then; SIGUSR1 is blocked and waits, even
  // though it is ignored.
  signal(SIGQUIT, SIG_IGN);
  signal(SIGUSR1, SIG_IGN);
  sigset_t later;
  sigemptyset(&later);
  sigaddset(&later, SIGUSR1);
  const bool ready = BecomeChild(launcher, stdout_fd, stderr_fd) &&
                     (options.inherited_fd < 0 ||
                      fcntl(options.inherited_fd, F_SETFD, 0) == 0) &&
                     sigprocmask(SIG_SETMASK, &later, nullptr) == 0;
  if (ready) execve(options.program.c_str(), argv, environment);
  const int error = errno;
  // If this fails, nobody can be told.
  const ssize_t written = write(error_fd, &error, sizeof(error));
  _exit(written == sizeof(error) ? 127 : 126);
}

absl::Status ForkError() {
  return absl::ResourceExhaustedError(
      absl::StrCat("cannot start a process: ", std::strerror(errno)));
}

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

absl::Status OpenStandardStreams() {
  for (;;) {
    const int fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (fd < 0) {
      return absl::UnavailableError(
          absl::StrCat("cannot open /dev/null: ", std::strerror(errno)));
    }
    if (fd > STDERR_FILENO) {
      close(fd);
      return absl::OkStatus();
    }
  }
}

ChildProcess::ChildProcess(pid_t pid, UniqueFd stdout_fd, UniqueFd stderr_fd)
    : pid_(pid), stdout_(std::move(stdout_fd)), stderr_(std::move(stderr_fd)) {
  fcntl(stdout_.get(), F_SETFL, O_NONBLOCK);
  fcntl(stderr_.get(), F_SETFL, O_NONBLOCK);
}

absl::StatusOr<ChildProcess> ChildProcess::Start(const Options& options) {
  FSDP_ASSIGN_OR_RETURN(Pipe out, MakePipe());
  FSDP_ASSIGN_OR_RETURN(Pipe err, MakePipe());
  FSDP_ASSIGN_OR_RETURN(Pipe error, MakePipe());
  const std::vector<char*> argv = Pointers(options.argv);
  const std::vector<char*> environment = Pointers(options.environment);
  const pid_t launcher = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    Exec(options, argv.data(), environment.data(), launcher, out.write.get(),
         err.write.get(), error.write.get());
  }
  if (pid < 0) return ForkError();
  ChildProcess child(pid, std::move(out.read), std::move(err.read));
  // A successful exec closes the pipe and nothing comes.
  error.write.Reset();
  int exec_errno = 0;
  if (read(error.read.get(), &exec_errno, sizeof(exec_errno)) > 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "cannot run ", options.program, ": ", std::strerror(exec_errno)));
  }
  return child;
}

absl::StatusOr<ChildProcess> ChildProcess::Fork(
    const std::function<int()>& run) {
  FSDP_ASSIGN_OR_RETURN(Pipe out, MakePipe());
  FSDP_ASSIGN_OR_RETURN(Pipe err, MakePipe());
  const pid_t launcher = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    const bool ready = BecomeChild(launcher, out.write.get(), err.write.get());
    // Whatever runs at the end of a process is for the parent.
    _exit(ready ? run() : 126);
  }
  if (pid < 0) return ForkError();
  return ChildProcess(pid, std::move(out.read), std::move(err.read));
}

ChildProcess::~ChildProcess() {
  if (pid_ == 0) return;
  Signal(SIGKILL);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void ChildProcess::Signal(int signal) const {
  if (pid_ == 0) return;
  // A program that has left its group is still ours.
  if (kill(-pid_, signal) != 0) kill(pid_, signal);
}

void ChildProcess::SignalAlone(int signal) const {
  if (pid_ != 0) kill(pid_, signal);
}

std::optional<ProcessEnd> ChildProcess::TryReap() {
  if (pid_ == 0) return std::nullopt;
  siginfo_t info = {};
  if (waitid(P_PID, static_cast<id_t>(pid_), &info,
             WEXITED | WNOHANG | WNOWAIT) != 0 ||
      info.si_pid == 0) {
    return std::nullopt;
  }
  // Until the process is reaped, its number names only this group.
  Signal(SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = 0;
  if (info.si_code == CLD_EXITED) return ProcessEnd{info.si_status, 0};
  return ProcessEnd{0, info.si_status};
}

bool ChildProcess::HasStopped() const {
  siginfo_t info = {};
  return pid_ != 0 &&
         waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WNOHANG) ==
             0 &&
         info.si_pid != 0;
}

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
  // If SIGCHLD were ignored, we would not learn how children end.
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
