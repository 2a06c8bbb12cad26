// Groups whose ranks are threads of one process: everything but the processes
// is real.
#ifndef COMM_TESTING_CONNECT_RANKS_H_
#define COMM_TESTING_CONNECT_RANKS_H_

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "comm/hierarchical/host_layout.h"

namespace fsdp::comm::testing {

using Group = std::vector<std::unique_ptr<Communicator>>;  // by rank

// Calls `connect` for each rank, on a thread of its own. Returns the results by
// rank, or the error of the lowest rank that has failed.
absl::StatusOr<Group> ConnectRanks(
    int world_size,
    const std::function<CreatedCommunicator(int rank)>& connect);

// Returns the communicators by rank. `world_ranks` are those of
// SharedMemoryOptions.
absl::StatusOr<Group> CreateSharedMemoryGroup(
    int world_size, absl::Duration timeout = absl::Seconds(30),
    std::vector<int> world_ranks = {});

// Returns the communicators by rank. `world_ranks` are those of GlooOptions.
absl::StatusOr<Group> CreateGlooGroup(
    int world_size, absl::Duration timeout = absl::Seconds(30),
    std::vector<int> world_ranks = {});

// Makes a group of `size` ranks and returns them by rank. `world_ranks` are
// their ranks in the world.
using GroupFactory = std::function<absl::StatusOr<Group>(
    int size, absl::Duration timeout, std::vector<int> world_ranks)>;

// Returns the communicators by rank. `inside` makes the groups of the hosts,
// `between` the others.
absl::StatusOr<Group> CreateHierarchicalGroup(
    const HostLayout& layout, const GroupFactory& inside,
    const GroupFactory& between, absl::Duration timeout = absl::Seconds(30));

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_CONNECT_RANKS_H_
