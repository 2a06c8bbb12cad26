#include "replicas/launcher/launch_replicas.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/hmac.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "comm/launcher/child_process.h"
#include "comm/launcher/launcher.h"
#include "comm/launcher/output_merger.h"
#include "comm/meeting/store_server.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/startup/environment.h"

namespace fsdp::replicas {
namespace {

constexpr char kLoopback[] = "127.0.0.1";

// How much longer than its ranks a launcher may take to end.
constexpr absl::Duration kSlack = absl::Seconds(10);

std::string EndText(const comm::ProcessEnd& end) {
  return end.signal != 0
             ? absl::StrCat("killed by ", comm::SignalText(end.signal))
             : absl::StrCat("exited with code ", end.exit_code);
}

// Launchers' lines have labels already; the keeper has something to say only
// where it fails.
std::vector<comm::OutputPump::Process> OutputOf(
    const comm::ChildProcess& keeper,
    const std::vector<comm::ChildProcess>& launchers) {
  std::vector<comm::OutputPump::Process> processes;
  processes.reserve(launchers.size() + 1);
  for (const comm::ChildProcess& launcher : launchers) {
    processes.push_back({launcher.stdout_fd(), launcher.stderr_fd(), ""});
  }
  processes.push_back({keeper.stdout_fd(), keeper.stderr_fd(), "[keeper] "});
  return processes;
}

// Runs the launchers of a job's replicas, and their keeper, to their end.
// Works on one thread with one poll(). Each launcher ends the ranks of its own
// replica; this class passes signals on to launchers, and their output, which
// has its labels already.
class ReplicasSupervisor {
 public:
  // `signals` outlives it.
  ReplicasSupervisor(const comm::LaunchOptions& options,
                     comm::SignalQueue* signals, comm::ChildProcess keeper,
                     std::vector<comm::ChildProcess> launchers)
      : stop_period_(2 * options.stop_period + kSlack),
        signals_(signals),
        keeper_(std::move(keeper)),
        launchers_(std::move(launchers)),
        output_(OutputOf(keeper_, launchers_), options.stdout_fd,
                options.stderr_fd) {
    report_.replicas.resize(launchers_.size());
  }

  // Returns when all launchers have ended and their output is written, or
  // nobody who reads it is waited for any longer. Call it once. The keeper ends
  // with this object.
  ReplicasReport Run() {
    while (alive() > 0) {
      output_.Poll(signals_->fd(), deadline_);
      HandleSignals();
      Reap();
      LookAfterKeeper();
      StopWithAll();
      if (absl::Now() >= deadline_) {
        PassOn(SIGKILL);
        deadline_ = absl::InfiniteFuture();
      }
    }
    output_.CloseSources();
    WaitForReader();
    report_.output_errno = output_.error();
    return report_;
  }

 private:
  size_t alive() const { return launchers_.size() - reaped_; }

  // Waits as long as it takes, unless somebody wants the job to end.
  void WaitForReader() {
    const absl::Time deadline = report_.interrupt_signal != 0
                                    ? absl::Now() + stop_period_
                                    : absl::InfiniteFuture();
    while (!output_.is_empty() && !gives_output_up_ && absl::Now() < deadline) {
      output_.Poll(signals_->fd(), deadline);
      HandleSignals();
    }
  }

  void HandleSignals() {
    for (int signal; (signal = signals_->Next()) != 0;) OnSignal(signal);
  }

  void OnSignal(int signal) {
    if (signal == SIGCHLD) return;
    if (signal == SIGQUIT || signal == SIGUSR1) {
      PassOn(signal);
    } else if (signal == SIGTSTP) {
      if (std::exchange(stops_, true)) return;
      has_stopped_.assign(launchers_.size(), false);
      PassOn(SIGTSTP);
    } else {
      if (report_.interrupt_signal == 0) report_.interrupt_signal = signal;
      gives_output_up_ = alive() == 0;
      End(signal);
    }
  }

  // A second time launchers kill their ranks.
  void End(int signal) {
    PassOn(signal);
    deadline_ = absl::Now() + stop_period_;
  }

  void PassOn(int signal) {
    for (const comm::ChildProcess& launcher : launchers_)
      launcher.SignalAlone(signal);
  }

  // Called after SIGTSTP, when all launchers have stopped their ranks and
  // themselves.
  void StopWithAll() {
    if (!stops_) return;
    for (size_t replica = 0; replica < launchers_.size(); ++replica) {
      const comm::ChildProcess& launcher = launchers_[replica];
      if (launcher.pid() == 0 || launcher.HasStopped()) {
        has_stopped_[replica] = true;
      }
      if (!has_stopped_[replica]) return;
    }
    stops_ = false;
    // Not where somebody wants it to end meanwhile.
    if (deadline_ == absl::InfiniteFuture()) raise(SIGSTOP);
    PassOn(SIGCONT);
  }

  void Reap() {
    for (size_t replica = 0; replica < launchers_.size(); ++replica) {
      const std::optional<comm::ProcessEnd> end = launchers_[replica].TryReap();
      if (!end.has_value()) continue;
      ++reaped_;
      report_.replicas[replica] = *end;
      if (end->signal != 0 || end->exit_code != 0) {
        report_.last_failed_replica = static_cast<int>(replica);
      }
    }
  }

  // Without it no replica comes to the next step.
  void LookAfterKeeper() {
    const std::optional<comm::ProcessEnd> end = keeper_.TryReap();
    if (!end.has_value() || alive() == 0) return;
    report_.keeper_was_lost = true;
    output_.Say(absl::StrCat("the keeper of the replicas ",
                             end->signal != 0 ? "was " : "", EndText(*end),
                             "; the job ends"));
    End(SIGTERM);
  }

  // How long launchers that were told to end may take until they get SIGKILL:
  // one period to end in, one for somebody to read what was printed.
  const absl::Duration stop_period_;
  comm::SignalQueue* const signals_;
  comm::ChildProcess keeper_;
  std::vector<comm::ChildProcess> launchers_;  // by replica
  size_t reaped_ = 0;
  comm::OutputPump output_;
  bool gives_output_up_ = false;
  bool stops_ = false;
  std::vector<bool> has_stopped_;  // by replica, while `stops_`
  ReplicasReport report_;
  absl::Time deadline_ = absl::InfiniteFuture();
};

void Print(absl::string_view name, absl::string_view text) {
  const std::string lines =
      absl::StrReplaceAll(text, {{"\n", absl::StrCat("\n", name, ": ")}});
  std::fprintf(stderr, "%s\n", absl::StrCat(name, ": ", lines).c_str());
}

// A launcher with nothing but its replica, as a process of its own.
int RunLauncher(int replica, const comm::LaunchOptions& options) {
  const std::string name = absl::StrCat("replica ", replica);
  const absl::StatusOr<comm::LaunchReport> report = comm::LaunchRanks(options);
  if (!report.ok()) {
    Print(name, report.status().ToString());
    return comm::ExitCodeOf(report.status());
  }
  if (report->exit_code() != 0 || !report->failed_attempts.empty()) {
    Print(name, report->ToString());
  }
  return report->exit_code();
}

// Returns only where it cannot serve.
int RunKeeper(UniqueFd listener, const std::string& secret) {
  const auto keeper = comm::StoreServer::Start(std::move(listener), secret);
  if (keeper.ok()) {
    for (;;) pause();
  }
  std::fprintf(stderr, "%s\n", keeper.status().ToString().c_str());
  return EXIT_FAILURE;
}

// Returns the options that all replicas have in common.
comm::LaunchOptions OfEach(int replicas, const comm::LaunchOptions& options,
                           int port, const std::string& secret) {
  comm::LaunchOptions each = options;
  each.stdout_fd = STDOUT_FILENO;
  each.stderr_fd = STDERR_FILENO;
  auto& variables = each.environment;
  variables.emplace_back("FSDP_REPLICAS", absl::StrCat(replicas));
  variables.emplace_back("FSDP_REPLICA_INCARNATION", "1");
  variables.emplace_back("FSDP_REPLICA_STORE",
                         absl::StrCat(kLoopback, ":", port));
  variables.emplace_back("FSDP_JOB_SECRET", secret);
  if (comm::FindVariable(options, "OMP_NUM_THREADS") == nullptr) {
    const int cores = comm::UsableCores();
    variables.emplace_back(
        "OMP_NUM_THREADS",
        absl::StrCat(std::max(1, cores / replicas / options.ranks)));
  }
  return each;
}

std::string SecretOf(const comm::LaunchOptions& options) {
  const char* secret = comm::FindVariable(options, "FSDP_JOB_SECRET");
  return secret == nullptr || *secret == '\0'
             ? absl::BytesToHexString(RandomBytes(32))
             : secret;
}

}  // namespace

int ReplicasReport::exit_code() const {
  const bool was_told = interrupt_signal != 0;
  if (!was_told && (keeper_was_lost || output_errno != 0)) return EXIT_FAILURE;
  const bool any_is_done =
      absl::c_any_of(replicas, [](const comm::ProcessEnd& end) {
        return end.signal == 0 && end.exit_code == 0;
      });
  if (any_is_done || last_failed_replica < 0) return EXIT_SUCCESS;
  const comm::ProcessEnd& last =
      replicas[static_cast<size_t>(last_failed_replica)];
  if (last.signal == 0) return last.exit_code;
  return 128 + (was_told ? interrupt_signal : last.signal);
}

std::string ReplicasReport::ToString() const {
  std::vector<std::string> parts;
  if (interrupt_signal != 0) {
    parts.push_back(
        absl::StrCat("interrupted by ", comm::SignalText(interrupt_signal)));
  }
  if (keeper_was_lost) {
    parts.push_back("the keeper of the replicas had ended");
  }
  std::map<std::string, std::vector<size_t>> groups;
  for (size_t replica = 0; replica < replicas.size(); ++replica) {
    groups[EndText(replicas[replica])].push_back(replica);
  }
  for (const auto& [end, members] : groups) {
    parts.push_back(absl::StrCat(members.size() == 1 ? "replica " : "replicas ",
                                 absl::StrJoin(members, ", "), " ", end));
  }
  if (output_errno != 0) {
    parts.push_back(absl::StrCat("what they printed could not be written: ",
                                 std::strerror(output_errno)));
  }
  return absl::StrJoin(parts, "; ");
}

absl::StatusOr<ReplicasReport> LaunchReplicas(
    int replicas, const comm::LaunchOptions& options) {
  FSDP_CHECK(replicas > 0);
  if (options.restarts.on_restart) {
    return absl::InvalidArgumentError(
        "restarts.on_restart is set: a replica that is started again has as "
        "many ranks as the others");
  }
  FSDP_RETURN_IF_ERROR(CheckLaunchOptions(options));
  const FileSizeErrors errors;
  // The ranks go on when nobody reads what they print any more.
  const SignalBlock no_reader(SIGPIPE);
  FSDP_RETURN_IF_ERROR(comm::OpenStandardStreams());
  FSDP_ASSIGN_OR_RETURN(comm::SignalQueue signals, comm::SignalQueue::Create());
  FSDP_ASSIGN_OR_RETURN(comm::Listener listener, comm::Listen(kLoopback, 0));
  const std::string secret = SecretOf(options);
  absl::StatusOr<comm::ChildProcess> keeper = comm::ChildProcess::Fork(
      [&] { return RunKeeper(std::move(listener.fd), secret); });
  FSDP_RETURN_IF_ERROR(Annotate(keeper.status(), "starting the keeper"));
  // So that a dead keeper refuses connections.
  listener.fd.Reset();
  comm::LaunchOptions each = OfEach(replicas, options, listener.port, secret);
  std::vector<comm::ChildProcess> launchers;
  for (int replica = 0; replica < replicas; ++replica) {
    each.environment.emplace_back("FSDP_REPLICA", absl::StrCat(replica));
    absl::StatusOr<comm::ChildProcess> launcher = comm::ChildProcess::Fork(
        [replica, &each] { return RunLauncher(replica, each); });
    FSDP_RETURN_IF_ERROR(
        Annotate(launcher.status(),
                 absl::StrCat("starting replica ", replica, " of ", replicas)));
    launchers.push_back(*std::move(launcher));
  }
  ReplicasSupervisor supervisor(options, &signals, *std::move(keeper),
                                std::move(launchers));
  return supervisor.Run();
}

}  // namespace fsdp::replicas
