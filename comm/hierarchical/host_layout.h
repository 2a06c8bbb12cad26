// How the ranks of a job are spread over hosts.
#ifndef COMM_HIERARCHICAL_HOST_LAYOUT_H_
#define COMM_HIERARCHICAL_HOST_LAYOUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace fsdp::comm {

// Every host has as many ranks as the others, and they follow each other: rank
// = host * ranks_per_host + place.
struct HostLayout {
  int num_hosts = 1;
  int ranks_per_host = 1;

  int host(int rank) const { return rank / ranks_per_host; }
  int place(int rank) const { return rank % ranks_per_host; }

  // The ranks of the host of `rank`, and those in its place on every host.
  std::vector<int> HostRanks(int rank) const;
  std::vector<int> RailRanks(int rank) const;
};

// `hosts`, by rank: equal for ranks of one host. FailedPrecondition says why it
// is no such layout.
absl::StatusOr<HostLayout> ArrangeHosts(absl::Span<const std::string> hosts);

// Which groups a split of a hierarchical group is made of.

// What a rank passes to Communicator::Split().
struct SplitRequest {
  int64_t color = 0;
  int64_t key = 0;
};

struct SplitPlan {
  enum class Kind {
    kInsideHosts,   // no group leaves its host
    kBetweenHosts,  // every group has one place on all its hosts
    // Every group has hosts of equally many ranks that follow each other, on
    // the same places.
    kHierarchical,
    kNetwork,  // anything else
  };
  Kind kind = Kind::kNetwork;
  // Of this rank where the new group is hierarchical.
  int host = 0;
  int place = 0;
};

// `requests`, by rank. All ranks come to the same kind.
SplitPlan PlanSplit(absl::Span<const SplitRequest> requests,
                    const HostLayout& layout, int rank);

}  // namespace fsdp::comm

#endif  // COMM_HIERARCHICAL_HOST_LAYOUT_H_
