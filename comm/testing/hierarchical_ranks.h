// A hierarchical group whose hosts are parts of one process and whose ranks are
// threads.
#ifndef COMM_TESTING_HIERARCHICAL_RANKS_H_
#define COMM_TESTING_HIERARCHICAL_RANKS_H_

#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "comm/hierarchical/host_layout.h"
#include "comm/testing/connect_ranks.h"

namespace fsdp::comm::testing {

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

#endif  // COMM_TESTING_HIERARCHICAL_RANKS_H_
