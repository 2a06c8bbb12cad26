#include "comm/hierarchical/host_layout.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

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

TEST(HostLayoutTest, OneHostAndOneRankPerHost) {
  ASSERT_OK_AND_ASSIGN(const HostLayout one, ArrangeHosts({"a", "a", "a"}));
  EXPECT_EQ(one.num_hosts, 1);
  EXPECT_EQ(one.ranks_per_host, 3);
  ASSERT_OK_AND_ASSIGN(const HostLayout each, ArrangeHosts({"a", "b", "c"}));
  EXPECT_EQ(each.num_hosts, 3);
  EXPECT_EQ(each.ranks_per_host, 1);
}

TEST(HostLayoutTest, RefusesRanksThatAlternate) {
  EXPECT_THAT(ArrangeHosts({"a", "b", "a", "b"}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("ranks 0 and 2 are on one, rank 1")));
  EXPECT_THAT(ArrangeHosts({"a", "b", "b", "a"}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("ranks 0 and 3 are on one, rank 2")));
}

TEST(HostLayoutTest, RefusesHostsOfDifferentSizes) {
  EXPECT_THAT(ArrangeHosts({"a", "a", "a", "b"}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("that of rank 0 has 3 of 4 ranks on 2")));
  EXPECT_THAT(ArrangeHosts({"a", "a", "b"}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("of 3 ranks on 2 hosts")));
}

TEST(HostLayoutTest, SaysWhoIsOnAHostAndWhoIsInOnePlaceOfAll) {
  HostLayout layout;
  layout.num_hosts = 2;
  layout.ranks_per_host = 3;
  EXPECT_EQ(layout.HostRanks(4), (std::vector<int>{3, 4, 5}));
  EXPECT_EQ(layout.HostRanks(0), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(layout.RailRanks(4), (std::vector<int>{1, 4}));
}

}  // namespace
}  // namespace fsdp::comm
