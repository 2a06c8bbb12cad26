#include "comm/testing/gloo_group.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/gloo/gloo_communicator.h"

namespace fsdp::comm::testing {

absl::StatusOr<Group> CreateGlooGroup(int world_size, absl::Duration timeout,
                                      std::vector<int> world_ranks) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  GlooOptions options;
  options.timeout = timeout;
  options.world_ranks = std::move(world_ranks);
  options.hostname = "127.0.0.1";
  return ConnectRanks(world_size, [&](int rank) {
    return CreateGlooCommunicator(store, rank, world_size, options);
  });
}

}  // namespace fsdp::comm::testing
