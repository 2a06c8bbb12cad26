#include <functional>
#include <vector>

#include "comm/hierarchical/host_layout.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using Kind = SplitPlan::Kind;

// The plans of all ranks of 4 hosts x 4 places.
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

Kind KindOf(const std::function<SplitRequest(int)>& request) {
  const std::vector<SplitPlan> plans = Plans(request);
  for (const SplitPlan& plan : plans) EXPECT_EQ(plan.kind, plans[0].kind);
  return plans[0].kind;
}

TEST(HierarchicalSplitTest, GroupsThatDoNotLeaveTheirHosts) {
  for (int size : {1, 2, 4}) {
    EXPECT_EQ(KindOf([&](int rank) {
                return SplitRequest{rank / size, -rank};
              }),
              Kind::kInsideHosts);
  }
}

TEST(HierarchicalSplitTest, GroupsOfOnePlaceOnAllHostsOrSome) {
  EXPECT_EQ(KindOf([](int rank) {
              return SplitRequest{rank % 4, 0};
            }),
            Kind::kBetweenHosts);
  EXPECT_EQ(KindOf([](int rank) {
              return SplitRequest{rank % 4 + rank / 8 * 4, -rank};
            }),
            Kind::kBetweenHosts);
}

TEST(HierarchicalSplitTest, GroupsOfWholeHostsOrTheSamePlacesOfThem) {
  EXPECT_EQ(KindOf([](int) {
              return SplitRequest{7, 0};
            }),
            Kind::kHierarchical);
  EXPECT_EQ(KindOf([](int rank) {
              return SplitRequest{rank / 8, 0};
            }),
            Kind::kHierarchical);
  EXPECT_EQ(KindOf([](int rank) {
              return SplitRequest{rank % 4 / 2, 0};
            }),
            Kind::kHierarchical);
}

TEST(HierarchicalSplitTest, HostsAndPlacesFollowTheKeys) {
  // Hosts 3 and 1 of each half, places in reverse.
  const std::vector<SplitPlan> plans = Plans([](int rank) {
    return SplitRequest{rank / 4 % 2, -rank};
  });
  for (int rank = 0; rank < 16; ++rank) {
    EXPECT_EQ(plans[rank].kind, Kind::kHierarchical);
    EXPECT_EQ(plans[rank].place, 3 - rank % 4);
    EXPECT_EQ(plans[rank].host, rank / 8 == 1 ? 0 : 1);
  }
}

TEST(HierarchicalSplitTest, GroupsOfDifferentShapes) {
  // Hosts 0 to 2 together, host 3 alone.
  const std::vector<SplitPlan> plans = Plans([](int rank) {
    return SplitRequest{rank / 12, 0};
  });
  EXPECT_EQ(plans[13].kind, Kind::kHierarchical);
  EXPECT_EQ(plans[13].host, 0);
  EXPECT_EQ(plans[9].host, 2);
  EXPECT_EQ(plans[9].place, 1);
}

TEST(HierarchicalSplitTest, AnythingElseNeedsTheNetwork) {
  // Keys that mix the hosts.
  EXPECT_EQ(KindOf([](int rank) {
              return SplitRequest{0, rank % 4};
            }),
            Kind::kNetwork);
  // Another place on every host.
  EXPECT_EQ(KindOf([](int rank) {
              return SplitRequest{(rank % 4 + rank / 4) % 4, 0};
            }),
            Kind::kNetwork);
  // 3 + 1 ranks of two hosts.
  EXPECT_EQ(KindOf([](int rank) {
              return SplitRequest{rank / 8 * 2 + (rank % 8 < 5 ? 0 : 1), 0};
            }),
            Kind::kNetwork);
  // One group is fine, another is not.
  EXPECT_EQ(KindOf([](int rank) {
              return SplitRequest{rank / 8, rank < 8 ? 0 : rank % 4};
            }),
            Kind::kNetwork);
}

}  // namespace
}  // namespace fsdp::comm
