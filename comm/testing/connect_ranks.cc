#include "comm/testing/connect_ranks.h"

#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>

#include "base/status_macros.h"
#include "comm/gloo/gloo_communicator.h"
#include "comm/hierarchical/hierarchical_communicator.h"
#include "comm/shared_memory/shared_memory_communicator.h"

namespace fsdp::comm::testing {

absl::StatusOr<Group> ConnectRanks(
    int world_size,
    const std::function<CreatedCommunicator(int rank)>& connect) {
  std::vector<CreatedCommunicator> results(world_size);
  std::vector<std::thread> threads;
  threads.reserve(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] { results[rank] = connect(rank); });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<std::unique_ptr<Communicator>> group;
  for (auto& result : results) {
    FSDP_ASSIGN_OR_RETURN(auto communicator, std::move(result));
    group.push_back(std::move(communicator));
  }
  return group;
}

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

namespace {

// Returns ranks as options of groups take them: none if they are all.
std::vector<int> PartOf(const HostLayout& layout, std::vector<int> ranks) {
  const auto size = static_cast<int>(ranks.size());
  if (size == layout.num_hosts * layout.ranks_per_host) ranks.clear();
  return ranks;
}

}  // namespace

absl::StatusOr<Group> CreateHierarchicalGroup(const HostLayout& layout,
                                              const GroupFactory& inside,
                                              const GroupFactory& between,
                                              absl::Duration timeout) {
  const int world_size = layout.num_hosts * layout.ranks_per_host;
  std::vector<HierarchicalParts> parts(world_size);
  for (int host = 0; host < layout.num_hosts; ++host) {
    FSDP_ASSIGN_OR_RETURN(
        auto group,
        inside(layout.ranks_per_host, timeout,
               PartOf(layout, layout.HostRanks(host * layout.ranks_per_host))));
    for (int place = 0; place < layout.ranks_per_host; ++place) {
      parts[host * layout.ranks_per_host + place].host =
          std::move(group[place]);
    }
  }
  for (int place = 0; place < layout.ranks_per_host; ++place) {
    FSDP_ASSIGN_OR_RETURN(auto group,
                          between(layout.num_hosts, timeout,
                                  PartOf(layout, layout.RailRanks(place))));
    for (int host = 0; host < layout.num_hosts; ++host) {
      parts[host * layout.ranks_per_host + place].rail = std::move(group[host]);
    }
  }
  FSDP_ASSIGN_OR_RETURN(auto network, between(world_size, timeout, {}));
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    parts[rank].network = std::move(network[rank]);
    FSDP_ASSIGN_OR_RETURN(ranks.emplace_back(), CreateHierarchicalCommunicator(
                                                    std::move(parts[rank])));
  }
  return ranks;
}

}  // namespace fsdp::comm::testing
