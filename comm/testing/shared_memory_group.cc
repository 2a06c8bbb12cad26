#include "comm/testing/shared_memory_group.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/shared_memory/shared_memory_communicator.h"

namespace fsdp::comm::testing {

absl::StatusOr<Group> CreateSharedMemoryGroup(int world_size,
                                              absl::Duration timeout,
                                              std::vector<int> world_ranks) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  SharedMemoryOptions options;
  options.timeout = timeout;
  options.world_ranks = std::move(world_ranks);
  return ConnectRanks(world_size, [&](int rank) {
    return CreateSharedMemoryCommunicator(store, rank, world_size, options);
  });
}

}  // namespace fsdp::comm::testing
