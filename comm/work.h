// A collective that has been started and may still be running.
#ifndef COMM_WORK_H_
#define COMM_WORK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace fsdp::comm {

// One collective that a rank has started. It is used by one thread at a time
// and keeps its tensors alive until it is done. It may be destroyed without
// Wait(): the operation still takes its place in the order of collectives.
class Work {
 public:
  Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  virtual ~Work() = default;

  // Blocks the host until the operation is done. Its buffers may then be read
  // and written. After an error the communicator is aborted and the outputs are
  // undefined:
  //   DeadlineExceeded  it was not done at `deadline`; the message names the
  //                     operation, its label, this rank and, where they are
  //                     known, the missing ranks
  //   Unavailable       a peer is gone
  //   InvalidArgument   the ranks' calls did not match
  //   Aborted           this rank or a peer called Abort(); has its reason
  // A second call returns what the first one returned.
  virtual absl::Status Wait(absl::Time deadline) = 0;

  // Waits for the outputs alone. Where ranks read each other's memory, peers
  // may still read the inputs then: write those only after Wait().
  virtual absl::Status WaitForResult(absl::Time deadline) {
    return Wait(deadline);
  }

  // Makes the current stream of the tensors' device wait for the operation,
  // without blocking the host where the device allows it. For tensors on the
  // CPU it is Wait(now + default_timeout()).
  virtual absl::Status BlockCurrentStream() = 0;

  // The number by which errors name the operation: 17 in "all-gather #17 of
  // blocks.2". It is -1 where errors give none, or where it is the count of the
  // group's calls before this one.
  virtual int64_t number() const { return -1; }
};

// One rank's end of a point that all ranks of a group have to reach, outside
// the order of collectives. Used by one thread at a time.
class Fence {
 public:
  Fence() = default;
  Fence(const Fence&) = delete;
  Fence& operator=(const Fence&) = delete;
  virtual ~Fence() = default;

  // This rank has reached the point once more; its reads and writes before it
  // are done. Never blocks.
  virtual void Arrive() = 0;

  // Blocks until every rank has arrived as many times as this one. What they
  // wrote before is then visible. Returns the errors of Work::Wait(), after
  // which the group is aborted; DeadlineExceeded names the missing ranks.
  virtual absl::Status Wait(absl::Time deadline) = 0;
};

}  // namespace fsdp::comm

#endif  // COMM_WORK_H_
