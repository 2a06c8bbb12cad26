// The log of a run that is to go as another one went.
#ifndef REPLICAS_REPLAY_LOG_H_
#define REPLICAS_REPLAY_LOG_H_

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "replicas/membership/history.h"
#include "replicas/membership/roster.h"
#include "replicas/step_log.h"

namespace fsdp::replicas {

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

#endif  // REPLICAS_REPLAY_LOG_H_
