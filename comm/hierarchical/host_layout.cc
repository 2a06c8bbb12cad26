#include "comm/hierarchical/host_layout.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

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

namespace {

// Returns how many members of each host follow each other, or 0 if the group is
// not hierarchical.
int RanksPerHost(const std::vector<int>& members, const HostLayout& layout) {
  const auto other_host = [&](int rank) {
    return layout.host(rank) != layout.host(members[0]);
  };
  const auto count = static_cast<size_t>(
      std::find_if(members.begin(), members.end(), other_host) -
      members.begin());
  if (members.size() % count != 0) return 0;
  std::set<int> hosts;
  for (size_t first = 0; first < members.size(); first += count) {
    if (!hosts.insert(layout.host(members[first])).second) return 0;
    for (size_t i = 0; i < count; ++i) {
      const int rank = members[first + i];
      const bool fits = layout.host(rank) == layout.host(members[first]) &&
                        layout.place(rank) == layout.place(members[i]);
      if (!fits) return 0;
    }
  }
  return static_cast<int>(count);
}

}  // namespace

SplitPlan PlanSplit(absl::Span<const SplitRequest> requests,
                    const HostLayout& layout, int rank) {
  bool inside_hosts = true;
  bool between_hosts = true;
  bool hierarchical = true;
  SplitPlan plan;
  for (const auto& [color, members] : MembersByColor(requests)) {
    for (int member : members) {
      inside_hosts =
          inside_hosts && layout.host(member) == layout.host(members[0]);
      between_hosts =
          between_hosts && layout.place(member) == layout.place(members[0]);
    }
    const int ranks_per_host = RanksPerHost(members, layout);
    hierarchical = hierarchical && ranks_per_host > 0;
    if (!hierarchical || color != requests[rank].color) continue;
    const int position = RankAmong(members, rank);
    plan.host = position / ranks_per_host;
    plan.place = position % ranks_per_host;
  }
  if (inside_hosts) {
    plan.kind = SplitPlan::Kind::kInsideHosts;
  } else if (between_hosts) {
    plan.kind = SplitPlan::Kind::kBetweenHosts;
  } else if (hierarchical) {
    plan.kind = SplitPlan::Kind::kHierarchical;
  }
  return plan;
}

}  // namespace fsdp::comm
