// How the ranks of a job are spread over hosts.
#ifndef COMM_HIERARCHICAL_HOST_LAYOUT_H_
#define COMM_HIERARCHICAL_HOST_LAYOUT_H_

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

}  // namespace fsdp::comm

#endif  // COMM_HIERARCHICAL_HOST_LAYOUT_H_
