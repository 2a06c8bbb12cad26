// The order of a job's ranks on its hosts.
#ifndef COMM_HIERARCHICAL_HOST_LAYOUT_H_
#define COMM_HIERARCHICAL_HOST_LAYOUT_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "comm/split_members.h"

namespace fsdp::comm {

// All hosts have the same number of ranks, which follow each other: rank = host
// * ranks_per_host + place.
struct HostLayout {
  int num_hosts = 1;
  int ranks_per_host = 1;

  int host(int rank) const { return rank / ranks_per_host; }
  int place(int rank) const { return rank % ranks_per_host; }

  // Returns the ranks of the host of `rank`.
  std::vector<int> HostRanks(int rank) const;
  // Returns the ranks that have the place of `rank` on each host.
  std::vector<int> RailRanks(int rank) const;
};

// Returns the layout of ranks on `hosts`, by rank; the names are equal for
// ranks of one host. FailedPrecondition says why there is no such layout.
absl::StatusOr<HostLayout> ArrangeHosts(absl::Span<const std::string> hosts);

struct SplitPlan {
  enum class Kind {
    kInsideHosts,   // no group leaves its host
    kBetweenHosts,  // every group has one place on all its hosts
    // In every group all hosts have the same number of ranks, which follow each
    // other, on the same places.
    kHierarchical,
    kNetwork,  // anything else
  };
  Kind kind = Kind::kNetwork;
  // This rank's host and place in a new group that is hierarchical.
  int host = 0;
  int place = 0;
};

// Decides from `requests`, by rank, which groups a split is made of. All ranks
// get the same kind.
SplitPlan PlanSplit(absl::Span<const SplitRequest> requests,
                    const HostLayout& layout, int rank);

}  // namespace fsdp::comm

#endif  // COMM_HIERARCHICAL_HOST_LAYOUT_H_
