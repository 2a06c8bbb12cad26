// Who is in which group of a Communicator::Split().
#ifndef COMM_SPLIT_MEMBERS_H_
#define COMM_SPLIT_MEMBERS_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/types/span.h"

namespace fsdp::comm {

// The arguments of one rank.
struct SplitRequest {
  int64_t color = 0;
  int64_t key = 0;
};

// Returns the ranks of each new group, in its order, by color. `requests` are
// by rank.
inline std::map<int64_t, std::vector<int>> MembersByColor(
    absl::Span<const SplitRequest> requests) {
  std::map<int64_t, std::vector<int>> groups;
  for (size_t rank = 0; rank < requests.size(); ++rank) {
    groups[requests[rank].color].push_back(static_cast<int>(rank));
  }
  for (auto& [color, members] : groups) {
    // Stable: equal keys stay in the order of the ranks.
    std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
      return requests[a].key < requests[b].key;
    });
  }
  return groups;
}

// Returns the rank that a member has in the new group.
inline int RankAmong(const std::vector<int>& members, int member) {
  const auto found = std::find(members.begin(), members.end(), member);
  return static_cast<int>(found - members.begin());
}

}  // namespace fsdp::comm

#endif  // COMM_SPLIT_MEMBERS_H_
