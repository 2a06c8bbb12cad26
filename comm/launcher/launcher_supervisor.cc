#include "comm/launcher/launcher_supervisor.h"

#include <signal.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "comm/launcher/processes/output_merger.h"

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

Supervisor::Supervisor(const Options& options, SignalQueue* signals,
                       std::vector<ChildProcess> children)
    : options_(options),
      signals_(signals),
      children_(std::move(children)),
      output_(OutputOf(children_),
              Labels(options.rank_prefix, children_.size()), options.stdout_fd,
              options.stderr_fd),
      ranks_(children_.size()),
      start_(absl::Now()) {}

void Supervisor::Run() {
  while (alive() > 0) {
    output_.Poll(signals_->fd(), deadline_);
    HandleSignals();
    Reap();
    if (absl::Now() >= deadline_) Escalate();
  }
  end_ = absl::Now();
  // What ranks have printed is in the pipes by now. Whoever still holds the
  // other end has left the job.
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

// Until what the ranks have printed is written: as long as it takes, unless
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
  Signal(signal);
}

void Supervisor::Signal(int signal) {
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

void Supervisor::Escalate() {
  if (phase_ == Phase::kGrace) {
    End(SIGTERM);
    phase_ = Phase::kTerminating;
    deadline_ = absl::Now() + options_.terminate_period;
  } else {
    Kill();
  }
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
  if (is_first && interrupt_signal_ == 0 && options_.on_failure) {
    options_.on_failure();
  }
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

}  // namespace fsdp::comm
