// How the ranks of a job are spread over hosts.
#ifndef COMM_HIERARCHICAL_HOST_LAYOUT_H_
#define COMM_HIERARCHICAL_HOST_LAYOUT_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace fsdp::comm {

// Every host has as many ranks as the others, and they follow each other: rank
// = host * ranks_per_host + place.
struct HostLayout {
  int num_hosts = 1;
  int ranks_per_host = 1;

  int host(int rank) const { return rank / ranks_per_host; }
  int place(int rank) const { return rank % ranks_per_host; }

  // `text`, which a group of the ranks of the host of `rank`, or of those in
  // its place on every host, has written: "rank 1" and "rank 1 of 2" become
  // what they are among all ranks.
  std::string NameHostRanks(int rank, absl::string_view text) const;
  std::string NameRailRanks(int rank, absl::string_view text) const;
};

// `hosts`, by rank: equal for ranks of one host. FailedPrecondition says why it
// is no such layout.
absl::StatusOr<HostLayout> ArrangeHosts(absl::Span<const std::string> hosts);

}  // namespace fsdp::comm

#endif  // COMM_HIERARCHICAL_HOST_LAYOUT_H_
