#include "comm/hierarchical/host_layout.h"

#include <functional>

#include "base/testing/status_matchers.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

TEST(HostLayoutTest, HostsOfConsecutiveRanks) {
  ASSERT_OK_AND_ASSIGN(const HostLayout layout,
                       ArrangeHosts({"b", "b", "b", "a", "a", "a"}));
  EXPECT_EQ(layout.num_hosts, 2);
  EXPECT_EQ(layout.ranks_per_host, 3);
  EXPECT_EQ(layout.host(5), 1);
  EXPECT_EQ(layout.place(5), 2);
}

TEST(HostLayoutTest, RefusesRanksThatAlternateAndHostsOfDifferentSizes) {
  EXPECT_THAT(ArrangeHosts({"a", "b", "a", "b"}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("ranks 0 and 2 are on one, rank 1")));
  EXPECT_THAT(ArrangeHosts({"a", "a", "a", "b"}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("that of rank 0 has 3 of 4 ranks on 2")));
}

TEST(HostLayoutTest, SaysWhoIsOnAHostAndWhoIsInOnePlaceOfAll) {
  HostLayout layout;
  layout.num_hosts = 2;
  layout.ranks_per_host = 3;
  EXPECT_EQ(layout.HostRanks(4), (std::vector<int>{3, 4, 5}));
  EXPECT_EQ(layout.HostRanks(0), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(layout.RailRanks(4), (std::vector<int>{1, 4}));
}

using Kind = SplitPlan::Kind;

SplitRequest Request(int64_t color, int64_t key) { return {color, key}; }

// Returns the plans of all ranks of 4 hosts x 4 places.
std::vector<SplitPlan> Plans(const std::function<SplitRequest(int)>& request) {
  HostLayout layout;
  layout.num_hosts = layout.ranks_per_host = 4;
  constexpr int kRanks = 16;
  std::vector<SplitRequest> requests;
  requests.reserve(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) requests.push_back(request(rank));
  std::vector<SplitPlan> plans;
  plans.reserve(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    plans.push_back(PlanSplit(requests, layout, rank));
  }
  return plans;
}

TEST(HierarchicalSplitTest, AllRanksPlanTheSameKind) {
  const struct {
    const char* what;
    Kind kind;
    SplitRequest (*request)(int rank);
  } cases[] = {
      {"single ranks", Kind::kInsideHosts,
       [](int rank) { return Request(rank, -rank); }},
      {"halves of hosts", Kind::kInsideHosts,
       [](int rank) { return Request(rank / 2, -rank); }},
      {"whole hosts", Kind::kInsideHosts,
       [](int rank) { return Request(rank / 4, -rank); }},
      {"one place on all hosts", Kind::kBetweenHosts,
       [](int rank) { return Request(rank % 4, 0); }},
      {"one place on some hosts", Kind::kBetweenHosts,
       [](int rank) { return Request(rank % 4 + rank / 8 * 4, -rank); }},
      {"all", Kind::kHierarchical, [](int) { return Request(7, 0); }},
      {"two hosts each", Kind::kHierarchical,
       [](int rank) { return Request(rank / 8, 0); }},
      {"the same places", Kind::kHierarchical,
       [](int rank) { return Request(rank % 4 / 2, 0); }},
      {"keys that mix the hosts", Kind::kNetwork,
       [](int rank) { return Request(0, rank % 4); }},
      {"a rank of every host, at different places", Kind::kNetwork,
       [](int rank) { return Request((rank % 4 + rank / 4) % 4, 0); }},
      {"4 + 1 ranks of two hosts", Kind::kNetwork,
       [](int rank) {
         return Request(rank / 8 * 2 + (rank % 8 < 5 ? 0 : 1), 0);
       }},
      {"one group is fine, another is not", Kind::kNetwork,
       [](int rank) { return Request(rank / 8, rank < 8 ? 0 : rank % 4); }},
  };
  for (const auto& test : cases) {
    for (const SplitPlan& plan : Plans(test.request)) {
      EXPECT_EQ(plan.kind, test.kind) << test.what;
    }
  }
}

TEST(HierarchicalSplitTest, GroupsOfDifferentShapes) {
  // Hosts 0 to 2 are together, and host 3 is alone.
  const std::vector<SplitPlan> plans =
      Plans([](int rank) { return Request(rank / 12, 0); });
  EXPECT_EQ(plans[13].kind, Kind::kHierarchical);
  EXPECT_EQ(plans[13].host, 0);
  EXPECT_EQ(plans[9].host, 2);
  EXPECT_EQ(plans[9].place, 1);
}

}  // namespace
}  // namespace fsdp::comm
