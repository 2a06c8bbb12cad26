// A point that all ranks of a group have to reach, outside the order of
// collectives.
#ifndef COMM_FENCE_H_
#define COMM_FENCE_H_

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace fsdp::comm {

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

#endif  // COMM_FENCE_H_
