// A communicator of ranks that are threads of one process.
#ifndef COMM_LOCAL_LOCAL_COMMUNICATOR_H_
#define COMM_LOCAL_LOCAL_COMMUNICATOR_H_

#include <c10/core/Device.h>

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// Options of CreateLocalGroup(), for all its ranks.
struct LocalGroupOptions {
  absl::Duration timeout = absl::Minutes(5);  // Communicator::default_timeout
  // The rank in the world of each rank, where the group is a part of it.
  std::vector<int> world_ranks = {};
  // The device of all tensors. Only the CPU's may be of several ranks.
  c10::Device device = c10::Device(c10::DeviceType::CPU);
};

// Returns the communicators of `world_size` > 0 ranks, by rank. Calls never
// block: the last rank to make a call moves the data for all. Reductions go
// through the ranks in order, so that results depend on nothing else. Calls
// that differ between ranks fail on all of them at once; so do calls that a
// destroyed communicator has not made.
//
// The one rank of a group on another device gets what it has passed: copies
// come after the work of the stream that was current at the call. A wait for
// them ends at its deadline, not by Abort().
absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateLocalGroup(
    int world_size, const LocalGroupOptions& options = {});

}  // namespace fsdp::comm

#endif  // COMM_LOCAL_LOCAL_COMMUNICATOR_H_
