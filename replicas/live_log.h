// The log of a run that is under way, and who watches over it.
#ifndef REPLICAS_LIVE_LOG_H_
#define REPLICAS_LIVE_LOG_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "replicas/history_file.h"
#include "replicas/membership/history.h"
#include "replicas/membership/membership.h"
#include "replicas/membership/registers.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {

struct LiveLogOptions {
  MembershipOptions membership;
  // The ranks of this replica, aborted once it is lost; outlives the log. Null:
  // there is one.
  comm::Communicator* inside = nullptr;
  // Called from another thread once the members are others than in epochs
  // before `epoch`.
  std::function<void(int64_t epoch)> on_epoch;
  // Asked while Enter() waits; may be null.
  std::function<bool()> stop_requested;
  std::string history_folder;  // empty: none
  // How long the keeper may be silent after a step has begun.
  absl::Duration patience = absl::Seconds(30);
};

// A thread of it lets the others hear of this rank, looks who is lost, and
// takes the keys "gone/2/1" of launchers, which say that incarnation 1 of
// replica 2 has ended, for its leave.
class LiveLog final : public StepLog {
 public:
  static absl::StatusOr<std::unique_ptr<LiveLog>> Start(
      LiveLogOptions options, std::unique_ptr<Registers> registers);
  // Leaves, unless the run is over.
  ~LiveLog() override;

  absl::StatusOr<Roster> Enter(int64_t first_step) override;
  absl::StatusOr<Roster> SkipLosses(const Roster& roster) override;
  absl::Status VoteFor(const Roster& roster) override;
  absl::StatusOr<Roster> AwaitNext(const Roster& roster,
                                   absl::Time deadline) override;

 private:
  LiveLog(LiveLogOptions options, std::unique_ptr<Registers> registers)
      : options_(std::move(options)), registers_(std::move(registers)) {}

  // The entry in which this replica takes part, or the end of the run; none:
  // not yet. All ranks of the replica alike; `mine`: what hinders this one.
  absl::StatusOr<std::optional<int64_t>> AwaitMembership(absl::Status mine);
  absl::StatusOr<Roster> Entry(int64_t number);
  // With which its step began.
  absl::StatusOr<Roster> BeginOf(Roster roster);
  void Note(const Roster& roster);
  void Watch();
  void WatchOnce();
  void EndIfLost(const Roster& newest);
  void TakeUpEnds(const Roster& roster);

  const LiveLogOptions options_;
  const std::unique_ptr<Registers> registers_;
  std::unique_ptr<Membership> membership_;
  std::unique_ptr<HistoryFile> history_;  // of one rank of the replica
  bool entered_ = false;
  bool over_ = false;
  int64_t epoch_ = -1;  // that on_epoch() was called for; of the thread
  std::atomic<int64_t> entered_with_{-1};  // the entry's number; -1: not yet

  absl::Mutex mutex_;
  bool stops_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// The log of a run that is to go as another one went.

// Asks nobody and waits for nobody: that ranks keep step is the collectives'
// business. A replica is told that it is lost where it was.
class ReplayLog final : public StepLog {
 public:
  // `history` begins with a founding. Whoever was lost before the step
  // `steps` is lost again; none later.
  ReplayLog(History history, const ReplicaId& self, int64_t steps)
      : history_(std::move(history)), self_(self), steps_(steps) {}

  // FailedPrecondition: the founder brought the state of another step.
  // InvalidArgument: the history has no step of this life, nor of a later one:
  // it comes after the end, or because an earlier one was lost that the history
  // has not lost. Never the run's end: see HasNoStep().
  absl::StatusOr<Roster> Enter(int64_t first_step) override;
  absl::StatusOr<Roster> SkipLosses(const Roster& roster) override;
  absl::Status VoteFor(const Roster& roster) override;
  absl::StatusOr<Roster> AwaitNext(const Roster& roster,
                                   absl::Time deadline) override;

  // This life is over where the history has its end, too. Any other error ends
  // the replay: the others may wait for this replica for ever.
  bool ends_as_recorded() const { return ends_as_recorded_; }

 private:
  // Why this life cannot take part; `end`: of the run.
  absl::Status HasNoStep(const Roster& end);
  absl::Status AsRecorded(const absl::Status& status);

  const History history_;
  const ReplicaId self_;
  const int64_t steps_;
  bool ends_as_recorded_ = false;
};

}  // namespace fsdp::replicas

#endif  // REPLICAS_LIVE_LOG_H_
