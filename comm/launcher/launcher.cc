#include "comm/launcher/launcher.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
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
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/file_size_errors.h"
#include "base/hmac.h"
#include "base/status_macros.h"
#include "comm/launcher/launcher_output.h"
#include "comm/launcher/launcher_process.h"
#include "comm/launcher/output_pump.h"
#include "comm/launcher/signal_queue.h"
#include "comm/startup/bootstrap_fd.h"
#include "comm/startup/bootstrap_socket.h"

namespace fsdp::comm {
namespace {

constexpr char kLoopback[] = "127.0.0.1";

// A killed process loses its connections before its end can be seen: a peer
// that misses it may be seen to end first, but not by more than this.
constexpr absl::Duration kSimultaneous = absl::Milliseconds(500);

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

std::optional<int> ColumnsOf(int fd) {
  if (!isatty(fd)) return std::nullopt;
  winsize size = {};
  const bool known = ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

// The environment of `rank` as "NAME=value".
std::vector<std::string> RankEnvironment(const LaunchOptions& options, int rank,
                                         const Listener& listener,
                                         const std::string& secret) {
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
  // Whoever has started the launcher may have given the ranks one already.
  if (variables["FSDP_JOB_SECRET"].empty()) {
    variables["FSDP_JOB_SECRET"] = secret;
  }
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
  result.reserve(variables.size());
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
  const std::string secret = absl::BytesToHexString(RandomBytes(32));
  std::vector<ChildProcess> children;
  for (int rank = 0; rank < options.ranks; ++rank) {
    ChildProcess::Options child;
    child.program = options.program;
    child.argv = options.argv;
    child.environment = RankEnvironment(options, rank, listener, secret);
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

std::vector<OutputPump::Source> OutputOf(
    const std::vector<ChildProcess>& children) {
  std::vector<OutputPump::Source> sources;
  for (size_t rank = 0; rank < children.size(); ++rank) {
    const ChildProcess& child = children[rank];
    const int number = static_cast<int>(rank);
    sources.push_back({child.stdout_fd(), number, OutputStream::kStdout});
    sources.push_back({child.stderr_fd(), number, OutputStream::kStderr});
  }
  return sources;
}

// Runs ranks to their end, on one thread and one poll().
class Supervisor {
 public:
  Supervisor(const LaunchOptions& options, SignalQueue* signals,
             std::vector<ChildProcess> children)
      : options_(options),
        signals_(signals),
        children_(std::move(children)),
        output_(OutputOf(children_), options.stdout_fd, options.stderr_fd) {
    report_.ranks.resize(children_.size());
  }

  LaunchReport Run() {
    while (alive() > 0) {
      output_.Poll(signals_->fd(), deadline_);
      HandleSignals();
      Reap();
      if (absl::Now() >= deadline_) Escalate();
    }
    // What ranks have printed is in the pipes by now. Whoever still holds the
    // other end has left the job.
    output_.CloseSources();
    WaitForReader();
    report_.output_errno = output_.error();
    return report_;
  }

 private:
  // How far the launcher has gone to end the ranks.
  enum class Phase { kRunning, kGrace, kTerminating, kKilled };

  size_t alive() const { return children_.size() - reaped_; }

  // Until what the ranks have printed is written: as long as it takes, unless
  // somebody wants the job to end.
  void WaitForReader() {
    const bool is_told_to_end = report_.interrupt_signal != 0;
    deadline_ = is_told_to_end ? absl::Now() + options_.stop_period
                               : absl::InfiniteFuture();
    while (!output_.is_empty() && !gives_output_up_ &&
           absl::Now() < deadline_) {
      output_.Poll(signals_->fd(), deadline_);
      HandleSignals();
    }
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
    if (signal == SIGQUIT || signal == SIGUSR1) {
      // What the ranks have started would be ended by it.
      for (const ChildProcess& child : children_) child.SignalAlone(signal);
      return;
    }
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
    deadline_ = absl::Now() + options_.stop_period;
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
      const std::optional<ProcessEnd> end = children_[rank].TryReap();
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
  OutputPump output_;
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

std::optional<int> TerminalColumns() {
  if (std::getenv("FSDP_LAUNCHER") == nullptr) return ColumnsOf(STDOUT_FILENO);
  const char* columns = std::getenv("FSDP_LAUNCHER_COLUMNS");
  int value = 0;
  if (std::getenv("FSDP_LAUNCHER_TTY") == nullptr || columns == nullptr ||
      !absl::SimpleAtoi(columns, &value)) {
    return std::nullopt;
  }
  return value;
}

}  // namespace fsdp::comm
