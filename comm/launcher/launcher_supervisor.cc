#include "comm/launcher/launcher_supervisor.h"

#include <signal.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "comm/launcher/launch_options.h"
#include "comm/launcher/output_merger.h"

namespace fsdp::comm {
namespace {

// A killed process loses its connections before its end can be seen: a peer
// that misses it may be seen to end first, but not by more than this.
constexpr absl::Duration kSimultaneous = absl::Milliseconds(500);

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

std::vector<std::string> Labels(const std::string& prefix, size_t ranks) {
  std::vector<std::string> labels;
  labels.reserve(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) {
    labels.push_back(RankLabel(prefix, static_cast<int>(rank)));
  }
  return labels;
}

}  // namespace

Supervisor::Supervisor(const LaunchOptions& options,
                       const std::string& rank_prefix,
                       std::function<void()> on_failure, SignalQueue* signals,
                       std::vector<ChildProcess> children)
    : options_(options),
      on_failure_(std::move(on_failure)),
      signals_(signals),
      children_(std::move(children)),
      output_(OutputOf(children_), Labels(rank_prefix, children_.size()),
              options.stdout_fd, options.stderr_fd),
      ranks_(children_.size()),
      start_(absl::Now()) {}

void Supervisor::Run() {
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
  // The ranks' output is in the pipes by now. Whoever still holds the other end
  // has left the job.
  output_.CloseSources();
  WaitForReader();
}

void Supervisor::Say(absl::string_view text) {
  output_.Say(text);
  WaitForReader();
}

LaunchAttempt Supervisor::attempt() const {
  return {ranks_, first_failed_rank_, end_ - start_};
}

// Waits until the ranks' output is written: as long as it takes, unless
// somebody wants the job to end.
void Supervisor::WaitForReader() {
  const bool is_told_to_end = interrupt_signal_ != 0;
  deadline_ = is_told_to_end ? absl::Now() + options_.stop_period
                             : absl::InfiniteFuture();
  while (!output_.is_empty() && !gives_output_up_ && absl::Now() < deadline_) {
    output_.Poll(signals_->fd(), deadline_);
    HandleSignals();
  }
}

void Supervisor::End(int signal) {
  sent_signals_.insert(signal);
  for (const ChildProcess& child : children_) child.Signal(signal);
}

void Supervisor::HandleSignals() {
  for (int signal; (signal = signals_->Next()) != 0;) OnSignal(signal);
}

void Supervisor::OnSignal(int signal) {
  if (signal == SIGCHLD) return;
  if (signal == SIGQUIT || signal == SIGUSR1) {
    const bool ends = signal == SIGUSR1 && options_.ends_by_usr1 && alive() > 0;
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

void Supervisor::Kill() {
  if (phase_ == Phase::kKilled) return;
  End(SIGKILL);
  phase_ = Phase::kKilled;
  deadline_ = absl::InfiniteFuture();
}

void Supervisor::Reap() {
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

void Supervisor::OnFailure(int rank) {
  const bool is_first = !std::exchange(has_failed_, true);
  if (is_first && interrupt_signal_ == 0 && on_failure_) on_failure_();
  if (phase_ == Phase::kRunning) {
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
      reason > first &&
      (first == Reason::kEcho || absl::Now() - first_failure_ < kSimultaneous);
  if (is_cause) first_failed_rank_ = rank;
}

Supervisor::Reason Supervisor::ReasonOf(int rank) const {
  const ProcessEnd& end = ranks_[rank].end;
  if (end.signal == 0 && end.exit_code == kPeerFailedExitCode) {
    return Reason::kEcho;
  }
  return end.signal == 0 || end.signal == SIGABRT ? Reason::kDecision
                                                  : Reason::kVictim;
}

namespace {

// An attempt that lasts this long has got on, if nobody counts progress.
constexpr absl::Duration kLongEnough = absl::Minutes(1);

std::string Ranks(int ranks) {
  return absl::StrCat(ranks, ranks == 1 ? " rank" : " ranks");
}

RestartPolicy::Decision None(std::string why) {
  return {0, absl::ZeroDuration(), std::move(why)};
}

}  // namespace

RestartPolicy::RestartPolicy(const RestartOptions& options)
    : options_(options) {
  if (options_.progress) progress_ = options_.progress();
}

bool RestartPolicy::HasGotOn(const LaunchAttempt& attempt) {
  if (!options_.progress) return attempt.lasted >= kLongEnough;
  const int64_t before = std::exchange(progress_, options_.progress());
  return progress_ > before;
}

absl::Duration RestartPolicy::Pause() const {
  absl::Duration pause = options_.pause;
  for (int i = 1; i < without_progress_ && pause < options_.longest_pause;
       ++i) {
    pause *= 2;
  }
  return std::min(pause, options_.longest_pause);
}

RestartPolicy::Decision RestartPolicy::Decide(const LaunchAttempt& attempt) {
  if (options_.max_restarts == 0) return {};
  without_progress_ = HasGotOn(attempt) ? 0 : without_progress_ + 1;
  const ProcessEnd& end = attempt.ranks[attempt.first_failed_rank].end;
  if (StopSignalOf(end) != 0) {
    return None(absl::StrCat("exit code ", end.exit_code,
                             " says that it was told to stop"));
  }
  if (end.signal == 0 && end.exit_code == kUsageErrorExitCode) {
    return None(absl::StrCat("exit code ", kUsageErrorExitCode,
                             " says that it would fail again"));
  }
  if (restarts_ >= options_.max_restarts) {
    return None(absl::StrCat("it was restarted ", restarts_,
                             restarts_ == 1 ? " time" : " times",
                             ", as often as it may be"));
  }
  if (without_progress_ >= options_.max_without_progress) {
    return None(absl::StrCat(
        without_progress_, " attempts in a row have not got on: ",
        options_.progress ? "nothing new was saved" : "each failed in a minute",
        "; what they have printed says why"));
  }
  const int ranks = options_.on_restart
                        ? options_.on_restart(attempt)
                        : static_cast<int>(attempt.ranks.size());
  if (ranks < std::max(1, options_.min_ranks)) {
    return None(absl::StrCat(Ranks(std::max(0, ranks)),
                             " would be left, and it needs at least ",
                             std::max(1, options_.min_ranks)));
  }
  ++restarts_;
  return {ranks, Pause(), std::string()};
}

}  // namespace fsdp::comm
