#include "comm/launcher/launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
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
#include "comm/launcher/launcher_process.h"
#include "comm/launcher/launcher_supervisor.h"
#include "comm/launcher/restart_policy.h"
#include "comm/launcher/signal_queue.h"
#include "comm/startup/bootstrap_fd.h"
#include "comm/startup/bootstrap_socket.h"

namespace fsdp::comm {
namespace {

constexpr char kLoopback[] = "127.0.0.1";

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

// One start of the ranks.
struct Start {
  int ranks;
  int restart;  // how many there were before
  const Listener& listener;
  std::string secret;
};

// The environment of `rank` as "NAME=value".
std::vector<std::string> RankEnvironment(const LaunchOptions& options,
                                         const Start& start, int rank) {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    variables.insert(absl::StrSplit(*entry, absl::MaxSplits('=', 1)));
  }
  variables.erase("FSDP_LAUNCHER_LISTEN_FD");
  variables.erase("FSDP_LAUNCHER_TTY");
  variables["FSDP_LAUNCHER"] = "1";
  variables["RANK"] = variables["LOCAL_RANK"] = absl::StrCat(rank);
  variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] =
      absl::StrCat(start.ranks);
  variables["MASTER_ADDR"] = kLoopback;
  variables["MASTER_PORT"] = absl::StrCat(start.listener.port);
  variables["TORCHELASTIC_RESTART_COUNT"] = absl::StrCat(start.restart);
  variables["TORCHELASTIC_MAX_RESTARTS"] =
      absl::StrCat(options.restarts.max_restarts);
  // Whoever has started the launcher may have given the ranks one already.
  if (variables["FSDP_JOB_SECRET"].empty()) {
    variables["FSDP_JOB_SECRET"] = start.secret;
  }
  if (rank == 0) {
    variables["FSDP_LAUNCHER_LISTEN_FD"] =
        absl::StrCat(start.listener.fd.get());
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
                          start.ranks)));
  for (const auto& [name, value] : options.environment) variables[name] = value;
  std::vector<std::string> result;
  result.reserve(variables.size());
  for (const auto& [name, value] : variables) {
    result.push_back(absl::StrCat(name, "=", value));
  }
  return result;
}

absl::StatusOr<std::vector<ChildProcess>> StartRanks(
    const LaunchOptions& options, int ranks, int restart) {
  // The port is taken before anybody is told of it, and rank 0 inherits the
  // socket: nothing can come between. Peers that are faster than rank 0 wait in
  // the socket's backlog. Here it closes again, so that a dead rank 0 refuses
  // connections.
  FSDP_ASSIGN_OR_RETURN(const Listener listener, Listen(kLoopback, 0));
  std::vector<ChildProcess> children;
  const Start start = {ranks, restart, listener,
                       absl::BytesToHexString(RandomBytes(32))};
  for (int rank = 0; rank < ranks; ++rank) {
    ChildProcess::Options child;
    child.program = options.program;
    child.argv = options.argv;
    child.environment = RankEnvironment(options, start, rank);
    if (rank == 0) child.inherited_fd = listener.fd.get();
    absl::StatusOr<ChildProcess> started = ChildProcess::Start(child);
    if (!started.ok()) {
      return absl::Status(started.status().code(),
                          absl::StrCat("starting rank ", rank, " of ", ranks,
                                       ": ", started.status().message()));
    }
    children.push_back(*std::move(started));
  }
  return children;
}

Supervisor::Options SupervisorOptions(const LaunchOptions& options) {
  return {options.grace_period, options.stop_period, options.terminate_period,
          options.stdout_fd, options.stderr_fd};
}

absl::Status CheckRestarts(const LaunchOptions& options) {
  const RestartOptions& restarts = options.restarts;
  if (restarts.max_restarts < 0) {
    return absl::InvalidArgumentError(absl::StrCat("restarts.max_restarts is ",
                                                   restarts.max_restarts,
                                                   ": expected at least 0"));
  }
  if (restarts.min_ranks > options.ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("restarts.min_ranks is ", restarts.min_ranks,
                     ": expected at most ranks, ", options.ranks));
  }
  return absl::OkStatus();
}

// One attempt after the other.
class Job {
 public:
  Job(const LaunchOptions& options, SignalQueue* signals)
      : options_(options),
        signals_(signals),
        policy_(options.restarts),
        ranks_(options.ranks) {}

  absl::StatusOr<LaunchReport> Run() {
    for (bool again = true; again;) {
      FSDP_RETURN_IF_ERROR(RunAttempt(&again));
    }
    return report_;
  }

 private:
  // Sets *again to whether there is to be another one.
  absl::Status RunAttempt(bool* again) {
    absl::StatusOr<std::vector<ChildProcess>> children =
        StartRanks(options_, ranks_, policy_.restarts());
    if (!children.ok()) return WithAttempts(children.status());
    Supervisor supervisor(SupervisorOptions(options_), signals_,
                          *std::move(children));
    supervisor.Run();
    Note(supervisor);
    *again = Decide(&supervisor);
    return absl::OkStatus();
  }

  // What there has been before a restart could not be had.
  absl::Status WithAttempts(const absl::Status& status) const {
    if (report_.ranks.empty()) return status;
    return absl::Status(
        status.code(),
        absl::StrCat("restart ", policy_.restarts(), ": ", status.message(),
                     "\nbefore: ", report_.ToString()));
  }

  void Note(const Supervisor& supervisor) {
    if (!report_.ranks.empty()) {
      report_.failed_attempts.push_back(report_.last_attempt());
    }
    LaunchAttempt attempt = supervisor.attempt();
    report_.ranks = std::move(attempt.ranks);
    report_.first_failed_rank = attempt.first_failed_rank;
    report_.lasted = attempt.lasted;
    Update(supervisor);
  }

  void Update(const Supervisor& supervisor) {
    report_.interrupt_signal = supervisor.interrupt_signal();
    if (report_.output_errno == 0) {
      report_.output_errno = supervisor.output_errno();
    }
  }

  bool Decide(Supervisor* supervisor) {
    if (report_.first_failed_rank < 0 || report_.interrupt_signal != 0) {
      return false;
    }
    const LaunchAttempt attempt = report_.last_attempt();
    const RestartPolicy::Decision decision = policy_.Decide(attempt);
    report_.gave_up = decision.why_none;
    if (decision.ranks == 0) return false;
    supervisor->Say(
        absl::StrCat(attempt.ToString(), "\nrestart ", policy_.restarts(),
                     " of ", options_.restarts.max_restarts, ", with ",
                     decision.ranks, decision.ranks == 1 ? " rank" : " ranks",
                     ", in ", absl::FormatDuration(decision.pause)));
    Update(*supervisor);
    ranks_ = decision.ranks;
    return report_.interrupt_signal == 0 && Pause(decision.pause);
  }

  // False where a signal has told the launcher to end meanwhile.
  bool Pause(absl::Duration duration) {
    const absl::Time end = absl::Now() + duration;
    while (absl::Now() < end) {
      pollfd wake = {signals_->fd(), POLLIN, 0};
      if (poll(&wake, 1, PollMilliseconds(end)) <= 0) continue;
      const int signal = signals_->Next();
      if (signal == SIGTSTP) raise(SIGSTOP);
      if (signal == 0 || signal == SIGCHLD || signal == SIGTSTP ||
          signal == SIGQUIT || signal == SIGUSR1) {
        continue;
      }
      report_.interrupt_signal = signal;
      return false;
    }
    return true;
  }

  const LaunchOptions& options_;
  SignalQueue* const signals_;
  RestartPolicy policy_;
  int ranks_;  // of the next attempt
  LaunchReport report_;
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
  FSDP_RETURN_IF_ERROR(CheckRestarts(options));
  const FileSizeErrors errors;
  FSDP_RETURN_IF_ERROR(OpenStandardStreams());
  FSDP_ASSIGN_OR_RETURN(SignalQueue signals, SignalQueue::Create());
  return Job(options, &signals).Run();
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
