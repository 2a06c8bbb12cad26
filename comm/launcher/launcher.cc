#include "comm/launcher/launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/file_size_errors.h"
#include "base/status_macros.h"
#include "comm/launcher/launcher_output.h"
#include "comm/launcher/launcher_process.h"
#include "comm/startup/bootstrap_fd.h"
#include "comm/startup/bootstrap_socket.h"

namespace fsdp::comm {
namespace {

constexpr char kLoopback[] = "127.0.0.1";

// While more than this waits to be written, ranks have to wait with printing.
constexpr size_t kMaxQueuedBytes = size_t{4} << 20;

// A pipe that poll() calls writable takes this much without blocking (PIPE_BUF
// of Linux).
constexpr size_t kMaxWrite = 4096;

// A killed process loses its connections before its end can be seen: a peer
// that misses it may be seen to end first, but not by more than this.
constexpr absl::Duration kSimultaneous = absl::Milliseconds(500);

bool IsIgnored(int signal) {
  struct sigaction action = {};
  return sigaction(signal, nullptr, &action) == 0 &&
         action.sa_handler == SIG_IGN;
}

// Puts signals in the way of a descriptor instead of a handler; the destructor
// restores what was. What the process ignores, as under nohup, it goes on
// ignoring: a blocked signal would come in spite of that.
class SignalQueue {
 public:
  static absl::StatusOr<SignalQueue> Create() {
    sigset_t handled;
    sigemptyset(&handled);
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGTSTP}) {
      if (!IsIgnored(signal)) sigaddset(&handled, signal);
    }
    sigaddset(&handled, SIGCHLD);
    SignalQueue queue;
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

  SignalQueue(SignalQueue&& other) noexcept
      : fd_(std::move(other.fd_)),
        previous_(other.previous_),
        previous_child_(other.previous_child_),
        restores_(std::exchange(other.restores_, false)) {}
  SignalQueue& operator=(SignalQueue&&) = delete;
  ~SignalQueue() {
    if (!restores_) return;
    pthread_sigmask(SIG_SETMASK, &previous_, nullptr);
    sigaction(SIGCHLD, &previous_child_, nullptr);
  }

  int fd() const { return fd_.get(); }

  // The next signal that has come; 0: none.
  int Next() {
    signalfd_siginfo info;
    if (read(fd_.get(), &info, sizeof(info)) != sizeof(info)) return 0;
    return static_cast<int>(info.ssi_signo);
  }

 private:
  SignalQueue() = default;

  UniqueFd fd_;
  sigset_t previous_ = {};
  struct sigaction previous_child_ = {};
  bool restores_ = true;
};

// A process without standard streams would get them as the first pipes.
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

absl::optional<int> ColumnsOf(int fd) {
  if (!isatty(fd)) return absl::nullopt;
  winsize size = {};
  const bool known = ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

// The environment of `rank` as "NAME=value".
std::vector<std::string> RankEnvironment(const LaunchOptions& options, int rank,
                                         const Listener& listener) {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    variables.insert(absl::StrSplit(*entry, absl::MaxSplits('=', 1)));
  }
  variables.erase("FSDP_LAUNCHER_LISTEN_FD");
  variables.erase("FSDP_LAUNCHER_TTY");
  variables["FSDP_LAUNCHER"] = "1";
  variables["RANK"] = variables["LOCAL_RANK"] = absl::StrCat(rank);
  variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] =
      absl::StrCat(options.ranks);
  variables["MASTER_ADDR"] = kLoopback;
  variables["MASTER_PORT"] = absl::StrCat(listener.port);
  if (rank == 0) {
    variables["FSDP_LAUNCHER_LISTEN_FD"] = absl::StrCat(listener.fd.get());
  }
  if (const auto columns = ColumnsOf(options.stdout_fd); columns.has_value()) {
    const std::string prefix = absl::StrCat("[", rank, "] ");
    variables["FSDP_LAUNCHER_TTY"] = "1";
    variables["FSDP_LAUNCHER_COLUMNS"] =
        absl::StrCat(std::max(1, *columns - static_cast<int>(prefix.size())));
  }
  // Ranks that each take all cores spend their time waiting for one another.
  variables.emplace(
      "OMP_NUM_THREADS",
      absl::StrCat(
          std::max(1, static_cast<int>(std::thread::hardware_concurrency()) /
                          options.ranks)));
  for (const auto& [name, value] : options.environment) variables[name] = value;
  std::vector<std::string> result;
  for (const auto& [name, value] : variables) {
    result.push_back(absl::StrCat(name, "=", value));
  }
  return result;
}

absl::StatusOr<std::vector<ChildProcess>> StartRanks(
    const LaunchOptions& options) {
  // The port is taken before anybody is told of it, and rank 0 inherits the
  // socket: nothing can come between. Peers that are faster than rank 0 wait in
  // the socket's backlog. Here it closes again, so that a dead rank 0 refuses
  // connections.
  FSDP_ASSIGN_OR_RETURN(const Listener listener, Listen(kLoopback, 0));
  std::vector<ChildProcess> children;
  for (int rank = 0; rank < options.ranks; ++rank) {
    ChildProcess::Options child;
    child.program = options.program;
    child.argv = options.argv;
    child.environment = RankEnvironment(options, rank, listener);
    if (rank == 0) child.inherited_fd = listener.fd.get();
    absl::StatusOr<ChildProcess> started = ChildProcess::Start(child);
    if (!started.ok()) {
      return absl::Status(
          started.status().code(),
          absl::StrCat("starting rank ", rank, " of ", options.ranks, ": ",
                       started.status().message()));
    }
    children.push_back(*std::move(started));
  }
  return children;
}

// Runs ranks to their end, on one thread and one poll().
class Supervisor {
 public:
  Supervisor(const LaunchOptions& options, SignalQueue* signals,
             std::vector<ChildProcess> children)
      : options_(options),
        signals_(signals),
        children_(std::move(children)),
        output_(isatty(options.stdout_fd), isatty(options.stderr_fd)) {
    report_.ranks.resize(children_.size());
    for (size_t rank = 0; rank < children_.size(); ++rank) {
      const ChildProcess& child = children_[rank];
      const int number = static_cast<int>(rank);
      sources_.push_back({child.stdout_fd(), number, OutputStream::kStdout});
      sources_.push_back({child.stderr_fd(), number, OutputStream::kStderr});
    }
  }

  LaunchReport Run() {
    while (alive() > 0) {
      Poll();
      HandleSignals();
      Reap();
      if (absl::Now() >= deadline_) Escalate();
    }
    // What ranks have printed is in the pipes by now. Whoever still holds the
    // other end has left the job.
    for (Source& source : sources_) {
      while (source.fd >= 0 && Read(&source)) {
      }
      output_.Close(source.rank, source.stream);
    }
    WaitForReader();
    return report_;
  }

 private:
  // How far the launcher has gone to end the ranks.
  enum class Phase { kRunning, kGrace, kTerminating, kKilled };

  struct Source {
    int fd;  // -1: at its end
    int rank;
    OutputStream stream;
  };

  size_t alive() const { return children_.size() - reaped_; }

  // Until what the ranks have printed is written: as long as it takes, unless
  // somebody wants the job to end.
  void WaitForReader() {
    const bool is_told_to_end = report_.interrupt_signal != 0;
    deadline_ = is_told_to_end ? absl::Now() + options_.grace_period
                               : absl::InfiniteFuture();
    while (!output_.empty() && !gives_output_up_ && absl::Now() < deadline_) {
      Poll();
      HandleSignals();
    }
  }

  // Waits until there is something to do, and moves output.
  void Poll() {
    std::vector<pollfd> fds = {{signals_->fd(), POLLIN, 0}};
    const bool writes = !output_.empty();
    if (writes) fds.push_back({SinkFd(), POLLOUT, 0});
    const size_t first_source = fds.size();
    const bool reads = output_.queued_bytes() < kMaxQueuedBytes;
    for (const Source& source : sources_) {
      fds.push_back({reads ? source.fd : -1, POLLIN, 0});
    }
    if (poll(fds.data(), fds.size(), PollMilliseconds(deadline_)) <= 0) return;
    if (writes && fds[1].revents != 0) Write();
    for (size_t i = 0; i < sources_.size(); ++i) {
      if (fds[first_source + i].revents != 0) Read(&sources_[i]);
    }
  }

  int SinkFd() const {
    return output_.front().stream == OutputStream::kStdout ? options_.stdout_fd
                                                           : options_.stderr_fd;
  }

  // Whether something was read.
  bool Read(Source* source) {
    char buffer[1 << 16];
    const ssize_t count = read(source->fd, buffer, sizeof(buffer));
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (count > 0) {
      if (!is_lost(source->stream)) {
        output_.Append(source->rank, source->stream,
                       {buffer, static_cast<size_t>(count)});
      }
      return true;
    }
    output_.Close(source->rank, source->stream);
    source->fd = -1;
    return false;
  }

  void Write() {
    const absl::string_view bytes = output_.front().bytes;
    const ssize_t count =
        write(SinkFd(), bytes.data(), std::min(bytes.size(), kMaxWrite));
    if (count >= 0) {
      output_.Consume(static_cast<size_t>(count));
    } else if (errno != EAGAIN && errno != EINTR) {
      Lose(output_.front().stream, errno);
    }
    while (!output_.empty() && is_lost(output_.front().stream)) {
      output_.Consume(output_.front().bytes.size());
    }
  }

  bool is_lost(OutputStream stream) const {
    return is_lost_[static_cast<size_t>(stream)];
  }

  // The ranks go on without. That nobody reads any more, as under a closed
  // terminal, is no failure; a full disk is.
  void Lose(OutputStream stream, int error) {
    is_lost_[static_cast<size_t>(stream)] = true;
    if (error == EPIPE || error == EIO) return;
    if (report_.output_errno == 0) report_.output_errno = error;
  }

  void End(int signal) {
    sent_signals_.insert(signal);
    Signal(signal);
  }

  void Signal(int signal) {
    for (const ChildProcess& child : children_) child.Signal(signal);
  }

  void HandleSignals() {
    for (int signal; (signal = signals_->Next()) != 0;) OnSignal(signal);
  }

  void OnSignal(int signal) {
    if (signal == SIGCHLD) return;
    if (signal == SIGTSTP) {
      // Ranks are not in the terminal's foreground group.
      Signal(SIGSTOP);
      raise(SIGSTOP);
      Signal(SIGCONT);
      return;
    }
    if (report_.interrupt_signal == 0) report_.interrupt_signal = signal;
    gives_output_up_ = alive() == 0;
    if (gives_output_up_) return;
    if (phase_ >= Phase::kTerminating) {
      Kill();
      return;
    }
    End(signal);
    phase_ = Phase::kTerminating;
    deadline_ = absl::Now() + options_.grace_period;
  }

  void Escalate() {
    if (phase_ == Phase::kGrace) {
      End(SIGTERM);
      phase_ = Phase::kTerminating;
      deadline_ = absl::Now() + options_.terminate_period;
    } else {
      Kill();
    }
  }

  void Kill() {
    if (phase_ == Phase::kKilled) return;
    End(SIGKILL);
    phase_ = Phase::kKilled;
    deadline_ = absl::InfiniteFuture();
  }

  void Reap() {
    for (size_t rank = 0; rank < children_.size(); ++rank) {
      const absl::optional<ProcessEnd> end = children_[rank].TryReap();
      if (!end.has_value()) continue;
      ++reaped_;
      report_.ranks[rank] = {*end, sent_signals_.count(end->signal) > 0};
      if (end->signal != 0 || end->exit_code != 0) {
        OnFailure(static_cast<int>(rank));
      }
    }
  }

  void OnFailure(int rank) {
    if (phase_ == Phase::kRunning) {
      report_.first_failed_rank = rank;
      phase_ = Phase::kGrace;
      first_failure_ = absl::Now();
      deadline_ = first_failure_ + options_.grace_period;
      return;
    }
    if (phase_ != Phase::kGrace) return;
    const Reason reason = ReasonOf(rank);
    const Reason first = ReasonOf(report_.first_failed_rank);
    const bool is_cause =
        reason > first && (first == Reason::kEcho ||
                           absl::Now() - first_failure_ < kSimultaneous);
    if (is_cause) report_.first_failed_rank = rank;
  }

  // Why a rank may have failed; of two the greater one explains the other.
  enum class Reason {
    kEcho,      // it has been told of another rank's failure, and says so
    kDecision,  // it ended by itself
    kVictim,    // it was killed
  };

  Reason ReasonOf(int rank) const {
    const ProcessEnd& end = report_.ranks[rank].end;
    if (end.signal == 0 && end.exit_code == kPeerFailedExitCode) {
      return Reason::kEcho;
    }
    return end.signal == 0 || end.signal == SIGABRT ? Reason::kDecision
                                                    : Reason::kVictim;
  }

  const LaunchOptions& options_;
  SignalQueue* const signals_;
  std::vector<ChildProcess> children_;  // by rank
  size_t reaped_ = 0;
  std::vector<Source> sources_;
  OutputMerger output_;
  std::array<bool, 2> is_lost_ = {};  // by OutputStream
  bool gives_output_up_ = false;
  LaunchReport report_;
  Phase phase_ = Phase::kRunning;
  std::set<int> sent_signals_;                    // to end the ranks
  absl::Time deadline_ = absl::InfiniteFuture();  // of the phase
  absl::Time first_failure_ = absl::InfinitePast();
};

}  // namespace

absl::StatusOr<LaunchReport> LaunchRanks(const LaunchOptions& options) {
  if (options.ranks < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("ranks is ", options.ranks, ": expected at least 1"));
  }
  if (options.argv.empty()) {
    return absl::InvalidArgumentError("argv is empty: expected the program");
  }
  const FileSizeErrors errors;
  FSDP_RETURN_IF_ERROR(OpenStandardStreams());
  FSDP_ASSIGN_OR_RETURN(SignalQueue signals, SignalQueue::Create());
  FSDP_ASSIGN_OR_RETURN(std::vector<ChildProcess> children,
                        StartRanks(options));
  return Supervisor(options, &signals, std::move(children)).Run();
}

absl::optional<int> TerminalColumns() {
  if (std::getenv("FSDP_LAUNCHER") == nullptr) return ColumnsOf(STDOUT_FILENO);
  const char* columns = std::getenv("FSDP_LAUNCHER_COLUMNS");
  int value = 0;
  if (std::getenv("FSDP_LAUNCHER_TTY") == nullptr || columns == nullptr ||
      !absl::SimpleAtoi(columns, &value)) {
    return absl::nullopt;
  }
  return value;
}

}  // namespace fsdp::comm
