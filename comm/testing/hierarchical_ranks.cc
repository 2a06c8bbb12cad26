#include "comm/testing/hierarchical_ranks.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "comm/hierarchical/hierarchical_communicator.h"
#include "comm/hierarchical/hierarchical_group.h"

namespace fsdp::comm::testing {

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
