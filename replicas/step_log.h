// The rosters that a rank goes through, one after the other.
#ifndef REPLICAS_STEP_LOG_H_
#define REPLICAS_STEP_LOG_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {

// Used by the rank's own thread. Aborted: this replica is no member any more.
class StepLog {
 public:
  virtual ~StepLog() = default;

  // Waits until this replica takes part: the roster with which the step begins
  // that it comes in, or one whose step is the run's end. All ranks of a
  // replica call it together, and get the same.
  virtual absl::StatusOr<Roster> Enter(int64_t first_step) = 0;
  // The newest roster of this step: `roster`, or what losses have left of it.
  virtual absl::StatusOr<Roster> SkipLosses(const Roster& roster) = 0;
  // This rank has all that it needs to finish the step of `roster`.
  virtual absl::Status VoteFor(const Roster& roster) = 0;
  // The entry after `roster`.
  virtual absl::StatusOr<Roster> AwaitNext(const Roster& roster,
                                           absl::Time deadline) = 0;
};

}  // namespace fsdp::replicas

#endif  // REPLICAS_STEP_LOG_H_
