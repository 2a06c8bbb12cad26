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
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/hmac.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "comm/launcher/child_process.h"
#include "comm/launcher/launch_options.h"
#include "comm/launcher/launcher.h"
#include "comm/launcher/output_merger.h"
#include "comm/meeting/store_server.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/startup/rank_device.h"

namespace fsdp::replicas {
namespace {

using comm::CheckLaunchOptions;
using comm::ChildProcess;
using comm::ExitCodeOf;
using comm::FindVariable;
using comm::LaunchOptions;
using comm::LaunchRanks;
using comm::LaunchReport;
using comm::Listen;
using comm::Listener;
using comm::OpenStandardStreams;
using comm::OutputPump;
using comm::OutputStream;
using comm::ProcessEnd;
using comm::SignalQueue;
using comm::SignalText;
using comm::StartKeeper;
using comm::UniqueFd;
using comm::UsableCores;

// A source for each process: launchers, whose lines have labels, and the
// keeper, which has something to say only where it fails.
std::vector<OutputPump::Source> OutputOf(
    const ChildProcess& keeper, const std::vector<ChildProcess>& launchers) {
  std::vector<OutputPump::Source> sources;
  int label = 0;
  const auto add = [&](const ChildProcess& process) {
    sources.push_back({process.stdout_fd(), label, OutputStream::kStdout});
    sources.push_back({process.stderr_fd(), label, OutputStream::kStderr});
    ++label;
  };
  for (const ChildProcess& launcher : launchers) add(launcher);
  add(keeper);
  return sources;
}

std::vector<std::string> Labels(size_t launchers) {
  std::vector<std::string> labels(launchers);
  labels.emplace_back("[keeper] ");
  return labels;
}

// Runs the launchers of a job's replicas, and their keeper, to their end.
// Works on one thread with one poll(). Each launcher ends the ranks of its own
// replica; this class passes signals on to launchers, and their output, which
// has its labels already.
class ReplicasSupervisor {
 public:
  struct Options {
    // How long launchers that were told to end may take until they get SIGKILL.
    absl::Duration stop_period;
    int stdout_fd = 1;
    int stderr_fd = 2;
  };

  // `signals` outlives it.
  ReplicasSupervisor(const Options& options, SignalQueue* signals,
                     ChildProcess keeper, std::vector<ChildProcess> launchers);

  // Returns when all launchers have ended and their output is written, or
  // nobody who reads it is waited for any longer. Call it once. The keeper ends
  // with this object.
  ReplicasReport Run();

 private:
  size_t alive() const { return launchers_.size() - reaped_; }
  void WaitForReader();
  void HandleSignals();
  void OnSignal(int signal);
  void End(int signal);
  void PassOn(int signal);
  // Called after SIGTSTP, when all launchers have stopped their ranks and
  // themselves.
  void StopWithAll();
  void Reap();
  void LookAfterKeeper();

  const Options options_;
  SignalQueue* const signals_;
  ChildProcess keeper_;
  std::vector<ChildProcess> launchers_;  // by replica
  size_t reaped_ = 0;
  OutputPump output_;
  bool gives_output_up_ = false;
  bool stops_ = false;
  std::vector<bool> has_stopped_;  // by replica, while `stops_`
  ReplicasReport report_;
  absl::Time deadline_ = absl::InfiniteFuture();
};

ReplicasSupervisor::ReplicasSupervisor(const Options& options,
                                       SignalQueue* signals,
                                       ChildProcess keeper,
                                       std::vector<ChildProcess> launchers)
    : options_(options),
      signals_(signals),
      keeper_(std::move(keeper)),
      launchers_(std::move(launchers)),
      output_(OutputOf(keeper_, launchers_), Labels(launchers_.size()),
              options.stdout_fd, options.stderr_fd) {
  report_.replicas.resize(launchers_.size());
}

ReplicasReport ReplicasSupervisor::Run() {
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

// As long as it takes, unless somebody wants the job to end.
void ReplicasSupervisor::WaitForReader() {
  const absl::Time deadline = report_.interrupt_signal != 0
                                  ? absl::Now() + options_.stop_period
                                  : absl::InfiniteFuture();
  while (!output_.is_empty() && !gives_output_up_ && absl::Now() < deadline) {
    output_.Poll(signals_->fd(), deadline);
    HandleSignals();
  }
}

void ReplicasSupervisor::HandleSignals() {
  for (int signal; (signal = signals_->Next()) != 0;) OnSignal(signal);
}

void ReplicasSupervisor::OnSignal(int signal) {
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
void ReplicasSupervisor::End(int signal) {
  PassOn(signal);
  deadline_ = absl::Now() + options_.stop_period;
}

void ReplicasSupervisor::PassOn(int signal) {
  for (const ChildProcess& launcher : launchers_) launcher.SignalAlone(signal);
}

void ReplicasSupervisor::StopWithAll() {
  if (!stops_) return;
  for (size_t replica = 0; replica < launchers_.size(); ++replica) {
    const ChildProcess& launcher = launchers_[replica];
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

void ReplicasSupervisor::Reap() {
  for (size_t replica = 0; replica < launchers_.size(); ++replica) {
    const std::optional<ProcessEnd> end = launchers_[replica].TryReap();
    if (!end.has_value()) continue;
    ++reaped_;
    report_.replicas[replica] = *end;
    if (end->signal != 0 || end->exit_code != 0) {
      report_.last_failed_replica = static_cast<int>(replica);
    }
  }
}

// Without it no replica comes to the next step.
void ReplicasSupervisor::LookAfterKeeper() {
  const std::optional<ProcessEnd> end = keeper_.TryReap();
  if (!end.has_value() || alive() == 0) return;
  report_.keeper_was_lost = true;
  output_.Say(absl::StrCat(
      "the keeper of the replicas ",
      end->signal != 0 ? absl::StrCat("was killed by ", SignalText(end->signal))
                       : absl::StrCat("exited with code ", end->exit_code),
      "; the job ends"));
  End(SIGTERM);
}

constexpr char kLoopback[] = "127.0.0.1";

// How much longer than its ranks a launcher may take to end.
constexpr absl::Duration kSlack = absl::Seconds(10);

absl::Status Check(int replicas, const LaunchOptions& options) {
  if (replicas < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("replicas is ", replicas, ": expected at least 1"));
  }
  if (options.restarts.on_restart) {
    return absl::InvalidArgumentError(
        "restarts.on_restart is set: a replica that is started again has as "
        "many ranks as the others");
  }
  return CheckLaunchOptions(options);
}

void Print(absl::string_view name, absl::string_view text) {
  const std::string lines =
      absl::StrReplaceAll(text, {{"\n", absl::StrCat("\n", name, ": ")}});
  std::fprintf(stderr, "%s\n", absl::StrCat(name, ": ", lines).c_str());
}

// A launcher with nothing but its replica, as a process of its own.
int RunLauncher(int replica, const LaunchOptions& options) {
  const std::string name = absl::StrCat("replica ", replica);
  const absl::StatusOr<LaunchReport> report = LaunchRanks(options);
  if (!report.ok()) {
    Print(name, report.status().ToString());
    return ExitCodeOf(report.status());
  }
  if (report->exit_code() != 0 || !report->failed_attempts.empty()) {
    Print(name, report->ToString());
  }
  return report->exit_code();
}

// Until it is killed.
int RunKeeper(UniqueFd listener, const std::string& secret) {
  const auto keeper = StartKeeper(std::move(listener), secret);
  if (keeper.ok()) {
    for (;;) pause();
  }
  std::fprintf(stderr, "%s\n", keeper.status().ToString().c_str());
  return EXIT_FAILURE;
}

// What all replicas have in common.
LaunchOptions OfEach(int replicas, const LaunchOptions& options, int port,
                     const std::string& secret) {
  LaunchOptions each = options;
  each.stdout_fd = STDOUT_FILENO;
  each.stderr_fd = STDERR_FILENO;
  auto& variables = each.environment;
  variables.emplace_back("FSDP_REPLICAS", absl::StrCat(replicas));
  variables.emplace_back("FSDP_REPLICA_INCARNATION", "1");
  variables.emplace_back("FSDP_REPLICA_STORE",
                         absl::StrCat(kLoopback, ":", port));
  variables.emplace_back("FSDP_JOB_SECRET", secret);
  if (FindVariable(options, "OMP_NUM_THREADS") == nullptr) {
    const int cores = UsableCores();
    variables.emplace_back(
        "OMP_NUM_THREADS",
        absl::StrCat(std::max(1, cores / replicas / options.ranks)));
  }
  return each;
}

std::string SecretOf(const LaunchOptions& options) {
  const char* secret = FindVariable(options, "FSDP_JOB_SECRET");
  return secret == nullptr || *secret == '\0'
             ? absl::BytesToHexString(RandomBytes(32))
             : secret;
}

absl::Status Annotated(const absl::Status& status, absl::string_view what) {
  return absl::Status(status.code(),
                      absl::StrCat(what, ": ", status.message()));
}

}  // namespace

int ReplicasReport::exit_code() const {
  const bool was_told = interrupt_signal != 0;
  if (!was_told && (keeper_was_lost || output_errno != 0)) return EXIT_FAILURE;
  const bool any_is_done =
      std::any_of(replicas.begin(), replicas.end(), [](const ProcessEnd& end) {
        return end.signal == 0 && end.exit_code == 0;
      });
  if (any_is_done || last_failed_replica < 0) return EXIT_SUCCESS;
  const ProcessEnd& last = replicas[static_cast<size_t>(last_failed_replica)];
  if (last.signal == 0) return last.exit_code;
  return 128 + (was_told ? interrupt_signal : last.signal);
}

std::string ReplicasReport::ToString() const {
  std::vector<std::string> parts;
  if (interrupt_signal != 0) {
    parts.push_back(
        absl::StrCat("interrupted by ", SignalText(interrupt_signal)));
  }
  if (keeper_was_lost) {
    parts.push_back("the keeper of the replicas had ended");
  }
  std::map<std::string, std::vector<size_t>> groups;
  for (size_t replica = 0; replica < replicas.size(); ++replica) {
    const ProcessEnd& end = replicas[replica];
    groups[end.signal != 0 ? absl::StrCat("killed by ", SignalText(end.signal))
                           : absl::StrCat("exited with code ", end.exit_code)]
        .push_back(replica);
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

absl::StatusOr<ReplicasReport> LaunchReplicas(int replicas,
                                              const LaunchOptions& options) {
  FSDP_RETURN_IF_ERROR(Check(replicas, options));
  const FileSizeErrors errors;
  FSDP_RETURN_IF_ERROR(OpenStandardStreams());
  FSDP_ASSIGN_OR_RETURN(SignalQueue signals, SignalQueue::Create());
  FSDP_ASSIGN_OR_RETURN(Listener listener, Listen(kLoopback, 0));
  const std::string secret = SecretOf(options);
  absl::StatusOr<ChildProcess> keeper = ChildProcess::Fork(
      [&] { return RunKeeper(std::move(listener.fd), secret); });
  if (!keeper.ok()) return Annotated(keeper.status(), "starting the keeper");
  // So that a dead keeper refuses connections.
  listener.fd.Reset();
  LaunchOptions each = OfEach(replicas, options, listener.port, secret);
  std::vector<ChildProcess> launchers;
  for (int replica = 0; replica < replicas; ++replica) {
    each.environment.emplace_back("FSDP_REPLICA", absl::StrCat(replica));
    absl::StatusOr<ChildProcess> launcher = ChildProcess::Fork(
        [replica, &each] { return RunLauncher(replica, each); });
    if (!launcher.ok()) {
      return Annotated(
          launcher.status(),
          absl::StrCat("starting replica ", replica, " of ", replicas));
    }
    launchers.push_back(*std::move(launcher));
  }
  // One period to end in, one for somebody to read what was printed.
  ReplicasSupervisor supervisor(
      {2 * options.stop_period + kSlack, options.stdout_fd, options.stderr_fd},
      &signals, *std::move(keeper), std::move(launchers));
  return supervisor.Run();
}

}  // namespace fsdp::replicas
