#include "comm/hierarchical/host_layout.h"

#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace fsdp::comm {

std::vector<int> HostLayout::HostRanks(int rank) const {
  std::vector<int> ranks(ranks_per_host);
  std::iota(ranks.begin(), ranks.end(), rank - place(rank));
  return ranks;
}

std::vector<int> HostLayout::RailRanks(int rank) const {
  std::vector<int> ranks(num_hosts);
  for (int h = 0; h < num_hosts; ++h) {
    ranks[h] = h * ranks_per_host + place(rank);
  }
  return ranks;
}

absl::StatusOr<HostLayout> ArrangeHosts(absl::Span<const std::string> hosts) {
  const auto num_ranks = static_cast<int>(hosts.size());
  struct Host {
    int first;
    int count = 0;
  };
  std::map<std::string, Host> known;
  for (int rank = 0; rank < num_ranks; ++rank) {
    Host& host = known.try_emplace(hosts[rank], Host{rank}).first->second;
    if (rank != host.first + host.count) {
      return absl::FailedPreconditionError(absl::StrCat(
          "the ranks of a host do not follow each other: ranks ", host.first,
          " and ", rank, " are on one, rank ", rank - 1, " is on another"));
    }
    ++host.count;
  }
  HostLayout layout;
  layout.num_hosts = static_cast<int>(known.size());
  layout.ranks_per_host = num_ranks / layout.num_hosts;
  for (const auto& [name, host] : known) {
    if (host.count == layout.ranks_per_host) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("the hosts do not have as many ranks each: that of rank ",
                     host.first, " has ", host.count, " of ", num_ranks,
                     " ranks on ", layout.num_hosts, " hosts"));
  }
  return layout;
}

}  // namespace fsdp::comm
