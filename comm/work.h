// A collective that has been started and may still be running.
#ifndef COMM_WORK_H_
#define COMM_WORK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace fsdp::comm {

// Owned by the rank that started it; used by one thread at a time. The work
// keeps its tensors alive until it is done. Dropping it without Wait() is
// allowed: the operation still takes its place in the order of collectives.
class Work {
 public:
  Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  virtual ~Work() = default;

  // Blocks the host until the operation is done; its buffers may then be read
  // and written. Errors, after which the communicator is aborted and the
  // outputs hold nothing of use:
  //   DeadlineExceeded  not done at `deadline`; the message names operation,
  //                     label, rank and, where known, the ranks missing
  //   Unavailable       a peer is gone
  //   InvalidArgument   the ranks' calls did not match
  //   Aborted           this rank or a peer called Abort(); carries its reason
  // A second call returns what the first returned.
  virtual absl::Status Wait(absl::Time deadline) = 0;

  // As Wait(), but the inputs may not be written yet, since peers may still
  // read them: not before Wait() has returned, too. Earlier than Wait() where
  // ranks read each other's memory.
  virtual absl::Status WaitForResult(absl::Time deadline) {
    return Wait(deadline);
  }

  // Makes the current stream of the tensors' device wait, without blocking the
  // host where the device allows it. On CPU: Wait(now + default_timeout()).
  virtual absl::Status BlockCurrentStream() = 0;

  // The one by which errors name it: 17 in "all-gather #17 of blocks.2". -1:
  // they do not, or it is the number of calls of the group before it.
  virtual int64_t number() const { return -1; }
};

// A point that all ranks of a group have to reach, outside the order of
// collectives.

// One rank's end. Used by one thread at a time.
class Fence {
 public:
  Fence() = default;
  Fence(const Fence&) = delete;
  Fence& operator=(const Fence&) = delete;
  virtual ~Fence() = default;

  // This rank has reached the point once more: what it has read and written so
  // far is done. Never blocks.
  virtual void Arrive() = 0;

  // Blocks until every rank has arrived as many times as this one; what they
  // wrote before is then visible. Errors as Work::Wait(), after which the group
  // is aborted; a deadline names the ranks that are missing.
  virtual absl::Status Wait(absl::Time deadline) = 0;
};

}  // namespace fsdp::comm

#endif  // COMM_WORK_H_
