// Where the ranks of a job find each other: a key-value store that rank 0
// serves, or a process that outlives them.
#ifndef COMM_MEETING_MEETING_H_
#define COMM_MEETING_MEETING_H_

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "comm/group/operation_watchdog.h"
#include "comm/startup/environment.h"

namespace fsdp::comm {

// Whom to blame where a rank does not get on, for those who give up waiting for
// it. Thread-safe.
class Suspect {
 public:
  explicit Suspect(std::string text) : text_(std::move(text)) {}

  void Set(std::string text) {
    absl::MutexLock lock(&mutex_);
    text_ = std::move(text);
  }
  std::string Get() const {
    absl::MutexLock lock(&mutex_);
    return text_;
  }

 private:
  mutable absl::Mutex mutex_;
  std::string text_ ABSL_GUARDED_BY(mutex_);
};

struct MeetingPlace {
  // All ranks can reach it as long as rank 0 holds it, or whoever else serves
  // it does. Where rank 0 does, whoever drops the last reference says goodbye;
  // rank 0 then waits a few seconds for the goodbyes of the others, so that
  // nobody's store goes away under it. Clones say nothing.
  c10::intrusive_ptr<c10d::Store> store;

  // An address of this host by which the other ranks can reach it: the one on
  // the way to rank 0.
  std::string local_address;
};

// Returns once all ranks of environment.world_size have called it with the same
// size. environment has a master address. Errors, the same on all ranks that
// have come:
//   DeadlineExceeded    names the ranks that had not come at `deadline`
//   InvalidArgument     the ranks were started with different world sizes
//   AlreadyExists       two processes claim one rank
// and on one rank:
//   FailedPrecondition  rank 0's port is in use
//   DeadlineExceeded    nobody answers at the master address
//   PermissionDenied    this rank or what listens there does not know the
//                       job's secret; the others then lack this rank, and say
//                       how many callers were refused
//   Unavailable         the store broke off
//   Cancelled           this rank is to stop; the others hear of it as Aborted
// An error may leave the store in `place`, so that the error can be told before
// its end waits for goodbyes. May hang past the deadline where torchrun's
// agent, which serves the store, has been stopped, since c10d's store has no
// deadline for an answer; `suspect` says so by then.
absl::Status Meet(const Environment& environment, const WaitLimits& limits,
                  Suspect* suspect, MeetingPlace* place);

}  // namespace fsdp::comm

#endif  // COMM_MEETING_MEETING_H_
