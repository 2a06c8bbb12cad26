#include "comm/launcher/launcher.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/hmac.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "comm/launcher/child_process.h"
#include "comm/launcher/output_merger.h"
#include "comm/launcher/restart_policy.h"
#include "comm/meeting/job_store.h"
#include "comm/meeting/store_message.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/startup/environment.h"

namespace fsdp::comm {
namespace {

constexpr char kLoopback[] = "127.0.0.1";

// The longest time that telling the keeper of replicas of an end may take.
constexpr absl::Duration kTellTime = absl::Seconds(5);

// Reads which replica the ranks are; nullopt if they are none. Only their FSDP_
// variables count, not those of whoever has started the launcher.
absl::StatusOr<std::optional<Environment>> ReadReplica(
    const LaunchOptions& options) {
  FSDP_ASSIGN_OR_RETURN(
      Environment environment, ReadEnvironment([&](const char* name) {
        return absl::StartsWith(name, "FSDP_") ? FindVariable(options, name)
                                               : nullptr;
      }));
  if (environment.replicas == 0) return std::nullopt;
  return environment;
}

// A killed process loses its connections before its end can be seen: a peer
// that misses it may be seen to end first, but not by more than this.
constexpr absl::Duration kSimultaneous = absl::Milliseconds(500);

std::vector<OutputPump::Process> OutputOf(
    const std::vector<ChildProcess>& ranks, const std::string& prefix) {
  std::vector<OutputPump::Process> processes;
  for (const ChildProcess& rank : ranks) {
    const int number = static_cast<int>(processes.size());
    processes.push_back({rank.stdout_fd(), rank.stderr_fd(),
                         absl::StrCat("[", prefix, number, "] ")});
  }
  return processes;
}

// Waits for the ranks and writes their output, with one thread and one poll().
// Ends the ranks when one fails or the launcher is told to end.
class Supervisor {
 public:
  // Lines of rank 3 begin with "[3] ", or "[1.3] " with the prefix "1.".
  // `on_failure`, which may be null, is called once, when the first rank does
  // not exit with 0 although nobody has told the launcher to end, and before
  // the others are ended. `options` and `signals` outlive it.
  Supervisor(const LaunchOptions& options, const std::string& rank_prefix,
             std::function<void()> on_failure, SignalQueue* signals,
             std::vector<ChildProcess> children)
      : options_(options),
        on_failure_(std::move(on_failure)),
        signals_(signals),
        children_(std::move(children)),
        output_(OutputOf(children_, rank_prefix), options.stdout_fd,
                options.stderr_fd),
        ranks_(children_.size()),
        start_(absl::Now()) {}

  // Returns once all ranks have ended and their output is written, or its
  // reader is given up. Call it once.
  void Run() {
    while (alive() > 0) {
      output_.Poll(signals_->fd(), deadline_);
      HandleSignals();
      Reap();
      if (absl::Now() < deadline_) continue;
      if (phase_ == Phase::kGrace) {
        End(SIGTERM);
        phase_ = Phase::kTerminating;
        deadline_ = absl::Now() + options_.terminate_period;
      } else {
        Kill();
      }
    }
    end_ = absl::Now();
    // The ranks' output is in the pipes by now. Whoever still holds the other
    // end has left the job.
    output_.CloseSources();
    WaitForReader();
  }

  // Writes a line behind the ranks' output, after Run().
  void Say(absl::string_view text) {
    output_.Say(text);
    WaitForReader();
  }

  LaunchAttempt attempt() const {
    return {ranks_, first_failed_rank_, end_ - start_};
  }
  int interrupt_signal() const { return interrupt_signal_; }  // 0: none
  int output_errno() const { return output_.error(); }

 private:
  // The step that the launcher has reached in ending the ranks.
  enum class Phase { kRunning, kGrace, kTerminating, kKilled };

  // The reason of a rank's failure. The greater of two explains the other.
  enum class Reason {
    kEcho,      // it says that another rank has failed
    kDecision,  // it ended by itself
    kVictim,    // it was killed
  };

  size_t alive() const { return children_.size() - reaped_; }

  // Waits until the ranks' output is written: as long as it takes, unless
  // somebody wants the job to end.
  void WaitForReader() {
    const bool is_told_to_end = interrupt_signal_ != 0;
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
    for (const ChildProcess& child : children_) child.Signal(signal);
  }

  void HandleSignals() {
    for (int signal; (signal = signals_->Next()) != 0;) OnSignal(signal);
  }

  void OnSignal(int signal) {
    if (signal == SIGCHLD) return;
    if (signal == SIGQUIT || signal == SIGUSR1) {
      const bool ends =
          signal == SIGUSR1 && options_.ends_by_usr1 && alive() > 0;
      if (ends && interrupt_signal_ == 0) interrupt_signal_ = signal;
      // The signal would end the processes that the ranks have started.
      for (const ChildProcess& child : children_) child.SignalAlone(signal);
      return;
    }
    if (signal == SIGTSTP) {
      // Ranks are not in the terminal's foreground group.
      for (const ChildProcess& child : children_) child.Signal(SIGSTOP);
      raise(SIGSTOP);
      for (const ChildProcess& child : children_) child.Signal(SIGCONT);
      return;
    }
    if (interrupt_signal_ == 0) interrupt_signal_ = signal;
    gives_output_up_ = alive() == 0;
    if (gives_output_up_) return;
    if (phase_ >= Phase::kTerminating) {
      if (absl::Now() - first_signal_ >= options_.signals_apart) Kill();
      return;
    }
    first_signal_ = absl::Now();
    End(signal);
    phase_ = Phase::kTerminating;
    deadline_ = absl::Now() + options_.stop_period;
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
      ranks_[rank] = {*end, sent_signals_.count(end->signal) > 0,
                      interrupt_signal_ != 0};
      if (end->signal != 0 || end->exit_code != 0) {
        OnFailure(static_cast<int>(rank));
      }
    }
  }

  void OnFailure(int rank) {
    if (phase_ == Phase::kRunning) {
      if (interrupt_signal_ == 0 && on_failure_) on_failure_();
      first_failed_rank_ = rank;
      phase_ = Phase::kGrace;
      first_failure_ = absl::Now();
      deadline_ = first_failure_ + options_.grace_period;
      return;
    }
    if (phase_ != Phase::kGrace) return;
    const Reason reason = ReasonOf(rank);
    const Reason first = ReasonOf(first_failed_rank_);
    const bool is_cause =
        reason > first && (first == Reason::kEcho ||
                           absl::Now() - first_failure_ < kSimultaneous);
    if (is_cause) first_failed_rank_ = rank;
  }

  Reason ReasonOf(int rank) const {
    const ProcessEnd& end = ranks_[rank].end;
    if (end.signal == 0 && end.exit_code == kPeerFailedExitCode) {
      return Reason::kEcho;
    }
    return end.signal == 0 || end.signal == SIGABRT ? Reason::kDecision
                                                    : Reason::kVictim;
  }

  const LaunchOptions& options_;
  const std::function<void()> on_failure_;
  SignalQueue* const signals_;
  std::vector<ChildProcess> children_;  // by rank
  size_t reaped_ = 0;
  OutputPump output_;
  bool gives_output_up_ = false;
  std::vector<RankEnd> ranks_;
  int first_failed_rank_ = -1;
  int interrupt_signal_ = 0;
  Phase phase_ = Phase::kRunning;
  std::set<int> sent_signals_;                      // to end the ranks
  absl::Time deadline_ = absl::InfiniteFuture();    // of the phase
  absl::Time first_signal_ = absl::InfinitePast();  // that ends the ranks
  absl::Time first_failure_ = absl::InfinitePast();
  const absl::Time start_;
  absl::Time end_ = absl::InfinitePast();
};

class Job {
 public:
  Job(const LaunchOptions& options, std::optional<Environment> replica,
      SignalQueue* signals)
      : options_(options),
        replica_(std::move(replica)),
        rank_prefix_(replica_.has_value() ? absl::StrCat(replica_->replica, ".")
                                          : ""),
        signals_(signals),
        policy_(options.restarts),
        ranks_(options.ranks) {}

  absl::StatusOr<LaunchReport> Run() {
    bool again = true;
    while (again) FSDP_RETURN_IF_ERROR(RunAttempt(&again));
    return report_;
  }

 private:
  // Returns the environment of `rank` as "NAME=value".
  std::vector<std::string> RankEnvironment(int rank, const Listener& listener,
                                           const std::string& secret) const {
    std::map<std::string, std::string> variables;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      variables.insert(absl::StrSplit(*entry, absl::MaxSplits('=', 1)));
    }
    variables.erase("FSDP_LAUNCHER_LISTEN_FD");
    variables["FSDP_LAUNCHER"] = "1";
    variables["RANK"] = variables["LOCAL_RANK"] = absl::StrCat(rank);
    variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] =
        absl::StrCat(ranks_);
    variables["MASTER_ADDR"] = kLoopback;
    variables["MASTER_PORT"] = absl::StrCat(listener.port);
    variables["TORCHELASTIC_RESTART_COUNT"] = absl::StrCat(policy_.restarts());
    variables["TORCHELASTIC_MAX_RESTARTS"] =
        absl::StrCat(options_.restarts.max_restarts);
    // The environment of the launcher may already have a secret for the ranks.
    // A replica gets its secret from its keeper.
    if (variables["FSDP_JOB_SECRET"].empty() && !replica_.has_value()) {
      variables["FSDP_JOB_SECRET"] = secret;
    }
    if (rank == 0) {
      variables["FSDP_LAUNCHER_LISTEN_FD"] = absl::StrCat(listener.fd.get());
    }
    // Ranks that each take all cores spend their time waiting for one another.
    variables.emplace("OMP_NUM_THREADS",
                      absl::StrCat(std::max(1, UsableCores() / ranks_)));
    for (const auto& [name, value] : options_.environment)
      variables[name] = value;
    if (replica_.has_value()) {
      variables["FSDP_REPLICA_INCARNATION"] = absl::StrCat(Incarnation());
    }
    std::vector<std::string> result;
    result.reserve(variables.size());
    for (const auto& [name, value] : variables) {
      result.push_back(absl::StrCat(name, "=", value));
    }
    return result;
  }

  absl::StatusOr<std::vector<ChildProcess>> StartRanks() const {
    // The port is taken before anybody is told of it, and rank 0 inherits the
    // socket, so that nobody else can take it. Peers that are faster than rank
    // 0 wait in the socket's backlog. This process closes the socket, so that a
    // dead rank 0 refuses connections.
    FSDP_ASSIGN_OR_RETURN(const Listener listener, Listen(kLoopback, 0));
    std::vector<ChildProcess> children;
    const std::string secret = absl::BytesToHexString(RandomBytes(32));
    for (int rank = 0; rank < ranks_; ++rank) {
      ChildProcess::Options child;
      child.program = options_.program;
      child.argv = options_.argv;
      child.environment = RankEnvironment(rank, listener, secret);
      if (rank == 0) child.inherited_fd = listener.fd.get();
      FSDP_ASSIGN_OR_RETURN(
          ChildProcess started,
          Annotate(ChildProcess::Start(child),
                   absl::StrCat("starting rank ", rank, " of ", ranks_)));
      children.push_back(std::move(started));
    }
    return children;
  }

  absl::Status RunAttempt(bool* again) {
    absl::StatusOr<std::vector<ChildProcess>> children = StartRanks();
    if (!children.ok()) {
      if (report_.ranks.empty()) return children.status();
      return absl::Status(children.status().code(),
                          absl::StrCat("restart ", policy_.restarts(), ": ",
                                       children.status().message(),
                                       "\nbefore: ", report_.ToString()));
    }
    std::string untold;
    std::function<void()> on_failure;
    if (replica_.has_value()) {
      on_failure = [this, &untold] { untold = TellEnd(); };
    }
    Supervisor supervisor(options_, rank_prefix_, on_failure, signals_,
                          *std::move(children));
    supervisor.Run();
    if (!report_.ranks.empty()) {
      report_.failed_attempts.push_back(report_);
    }
    static_cast<LaunchAttempt&>(report_) = supervisor.attempt();
    Update(supervisor);
    if (!untold.empty()) Say(&supervisor, untold);
    *again = Decide(&supervisor);
    return absl::OkStatus();
  }

  void Update(const Supervisor& supervisor) {
    report_.interrupt_signal = supervisor.interrupt_signal();
    if (report_.output_errno == 0) {
      report_.output_errno = supervisor.output_errno();
    }
  }

  // Each attempt of a replica's ranks is another one.
  int Incarnation() const {
    return replica_->replica_incarnation + policy_.restarts();
  }

  // Tells the keeper of the end, so that other replicas need not infer it from
  // the silence of this one. Returns what to say if that fails, or "".
  std::string TellEnd() const {
    const absl::Time deadline = absl::Now() + kTellTime;
    absl::StatusOr<std::unique_ptr<StoreConnection>> keeper =
        StoreConnection::Open(replica_->keeper_addr, replica_->keeper_port,
                              replica_->secret, {deadline});
    absl::Status told = keeper.status();
    if (told.ok()) {
      const std::string key =
          absl::StrCat("replicas/gone/", replica_->replica, "/", Incarnation());
      told = (*keeper)
                 ->Call({static_cast<uint8_t>(StoreAsk::kSet), 0, {key, "1"}},
                        deadline)
                 .status();
    }
    if (told.ok()) return "";
    return absl::StrCat("telling the keeper that incarnation ", Incarnation(),
                        " has ended: ", told.message());
  }

  void Say(Supervisor* supervisor, absl::string_view text) {
    const std::string name =
        replica_.has_value() ? absl::StrCat("replica ", replica_->replica, ": ")
                             : "";
    supervisor->Say(absl::StrCat(
        name, absl::StrReplaceAll(text, {{"\n", absl::StrCat("\n", name)}})));
    Update(*supervisor);
  }

  bool Decide(Supervisor* supervisor) {
    if (report_.first_failed_rank < 0 || report_.interrupt_signal != 0) {
      return false;
    }
    const LaunchAttempt& attempt = report_;
    const RestartPolicy::Decision decision = policy_.Decide(attempt);
    report_.gave_up = decision.why_none;
    if (decision.ranks == 0) return false;
    Say(supervisor,
        absl::StrCat(attempt.ToString(), "\nrestart ", policy_.restarts(),
                     " of ", options_.restarts.max_restarts, ", with ",
                     decision.ranks, decision.ranks == 1 ? " rank" : " ranks",
                     ", in ", absl::FormatDuration(decision.pause)));
    ranks_ = decision.ranks;
    return report_.interrupt_signal == 0 && Pause(decision.pause);
  }

  // Returns false if a signal has told the launcher to end meanwhile.
  bool Pause(absl::Duration duration) {
    const absl::Time end = absl::Now() + duration;
    while (absl::Now() < end) {
      pollfd wake = {signals_->fd(), POLLIN, 0};
      if (poll(&wake, 1, PollMilliseconds(end)) <= 0) continue;
      const int signal = signals_->Next();
      if (signal == SIGTSTP) raise(SIGSTOP);
      if (signal == 0 || signal == SIGCHLD || signal == SIGTSTP ||
          signal == SIGQUIT || (signal == SIGUSR1 && !options_.ends_by_usr1)) {
        continue;
      }
      report_.interrupt_signal = signal;
      return false;
    }
    return true;
  }

  const LaunchOptions& options_;
  const std::optional<Environment> replica_;
  const std::string rank_prefix_;  // "1." for replica 1
  SignalQueue* const signals_;
  RestartPolicy policy_;
  int ranks_;  // of the next attempt
  LaunchReport report_;
};

}  // namespace

absl::StatusOr<LaunchReport> LaunchRanks(const LaunchOptions& options) {
  FSDP_RETURN_IF_ERROR(CheckLaunchOptions(options));
  FSDP_ASSIGN_OR_RETURN(std::optional<Environment> replica,
                        ReadReplica(options));
  const FileSizeErrors errors;
  // The ranks go on when nobody reads what they print any more.
  const SignalBlock no_reader(SIGPIPE);
  FSDP_RETURN_IF_ERROR(OpenStandardStreams());
  FSDP_ASSIGN_OR_RETURN(SignalQueue signals, SignalQueue::Create());
  return Job(options, std::move(replica), &signals).Run();
}

}  // namespace fsdp::comm
