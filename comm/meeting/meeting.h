// Lets the ranks of a job find each other, in a key-value store that rank 0 or
// a process that outlives the ranks serves.
#ifndef COMM_MEETING_MEETING_H_
#define COMM_MEETING_MEETING_H_

#include <atomic>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/status/status.h"
#include "comm/group/operation_watchdog.h"
#include "comm/startup/environment.h"

namespace fsdp::comm {

// Says what a rank is most likely waiting for, to whoever gives up waiting for
// that rank: a literal.
using Suspect = std::atomic<const char*>;

struct MeetingPlace {
  // All ranks can reach the store as long as rank 0 holds it, or the other
  // process that serves it runs. Where rank 0 serves it, a rank says goodbye
  // when it drops its last reference; rank 0 then waits a few seconds for the
  // goodbyes of the others, so that none loses the store too early. Clones say
  // nothing.
  c10::intrusive_ptr<c10d::Store> store;

  // The address of this host on the way to rank 0. Other ranks can reach it.
  std::string local_address;
};

// Returns once all environment.world_size ranks have called it with the same
// size. `environment` has a master address. Errors that are the same on all
// ranks that have come:
//   DeadlineExceeded    names the ranks that had not come at `deadline`
//   InvalidArgument     the ranks were started with different world sizes
//   AlreadyExists       two processes claim one rank
// Errors of one rank:
//   FailedPrecondition  rank 0's port is in use
//   DeadlineExceeded    nobody answers at the master address
//   PermissionDenied    this rank or what listens there does not know the
//                       job's secret; the others then lack this rank, and say
//                       how many callers were refused
//   Unavailable         the store broke off
//   Cancelled           this rank is to stop; the others hear of it as Aborted
// After an error `place` may hold the store, so that the caller can report the
// error before it drops the store, which waits for goodbyes. The call may hang
// past the deadline if torchrun's agent serves the store and has been stopped,
// since c10d's store has no deadline for an answer; `suspect` says so then.
absl::Status Meet(const Environment& environment, const WaitLimits& limits,
                  Suspect* suspect, MeetingPlace* place);

}  // namespace fsdp::comm

#endif  // COMM_MEETING_MEETING_H_
