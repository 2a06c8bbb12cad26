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

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>>
CreateHierarchicalGroup(const HostLayout& layout, const GroupFactory& inside,
                        const GroupFactory& between, absl::Duration timeout) {
  const int world_size = layout.num_hosts * layout.ranks_per_host;
  std::vector<HierarchicalParts> parts(world_size);
  for (int host = 0; host < layout.num_hosts; ++host) {
    FSDP_ASSIGN_OR_RETURN(auto group, inside(layout.ranks_per_host, timeout));
    for (int place = 0; place < layout.ranks_per_host; ++place) {
      parts[host * layout.ranks_per_host + place].host =
          std::move(group[place]);
    }
  }
  for (int place = 0; place < layout.ranks_per_host; ++place) {
    FSDP_ASSIGN_OR_RETURN(auto group, between(layout.num_hosts, timeout));
    for (int host = 0; host < layout.num_hosts; ++host) {
      parts[host * layout.ranks_per_host + place].rail = std::move(group[host]);
    }
  }
  FSDP_ASSIGN_OR_RETURN(auto network, between(world_size, timeout));
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    parts[rank].network = std::move(network[rank]);
    FSDP_ASSIGN_OR_RETURN(ranks.emplace_back(), CreateHierarchicalCommunicator(
                                                    std::move(parts[rank])));
  }
  return ranks;
}

}  // namespace fsdp::comm::testing
