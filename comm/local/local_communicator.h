// A communicator of ranks that are threads of one process.
#ifndef COMM_LOCAL_LOCAL_COMMUNICATOR_H_
#define COMM_LOCAL_LOCAL_COMMUNICATOR_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace fsdp::comm {

struct LocalGroupOptions {
  absl::Duration timeout = absl::Minutes(5);  // Communicator::default_timeout
  // The rank in the world of each rank, where the group is a part of it.
  std::vector<int> world_ranks = {};
};

// Returns the communicators of `world_size` > 0 ranks, by rank. They take CPU
// tensors only. Calls never block: the last rank to make a call moves the data
// for all. Reductions go through the ranks in order, so that results depend on
// nothing else. Calls that differ between ranks fail on all of them at once; so
// do calls that a destroyed communicator has not made.
absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateLocalGroup(
    int world_size, const LocalGroupOptions& options = {});

}  // namespace fsdp::comm

#endif  // COMM_LOCAL_LOCAL_COMMUNICATOR_H_
