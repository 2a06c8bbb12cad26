#include "replicas/launcher/replicas_supervisor.h"

#include <signal.h>

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "comm/launcher/launch_options.h"
#include "comm/launcher/processes/child_process.h"
#include "comm/launcher/processes/output_merger.h"
#include "comm/launcher/processes/process_end.h"
#include "replicas/launcher/replicas_report.h"

namespace fsdp::comm {
namespace {

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

}  // namespace

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

}  // namespace fsdp::comm
