// A shared-memory group whose ranks are threads of one process: everything but
// the processes is real.
#ifndef COMM_TESTING_SHARED_MEMORY_GROUP_H_
#define COMM_TESTING_SHARED_MEMORY_GROUP_H_

#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/testing/connect_ranks.h"

namespace fsdp::comm::testing {

// Returns the communicators by rank. `world_ranks` are those of
// SharedMemoryOptions.
absl::StatusOr<Group> CreateSharedMemoryGroup(
    int world_size, absl::Duration timeout = absl::Seconds(30),
    std::vector<int> world_ranks = {});

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_SHARED_MEMORY_GROUP_H_
