// Replicas leave, are silent, asleep or slow, and the others go on without
// them.
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "replicas/membership/membership.h"
#include "replicas/membership/roster.h"
#include "replicas/membership/testing/membership_on_a_clock.h"

namespace fsdp::replicas {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::_;
using ::testing::AllOf;
using ::testing::HasSubstr;

class MembershipLossesTest : public testing::MembershipOnAClock {};

TEST_F(MembershipLossesTest, WhoLeavesIsGoneAtOnce) {
  auto members = Founded(3);
  const Roster roster = members[0]->latest();
  EXPECT_OK(members[2]->Leave());
  EXPECT_EQ(Poll(*members[0]), "1 1 5 3 lost 0.0 1.0*");
  EXPECT_THAT(members[2]->Next(roster),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("2.0 is no member of entry 1"),
                             HasSubstr("may request to join again"))));
  EXPECT_OK(TellGone(memory_, {1, 0}));
  EXPECT_EQ(Poll(*members[0]), "2 2 5 3 lost 0.0");
}

TEST_F(MembershipLossesTest, WhoIsSilentIsLost) {
  auto members = Founded(2);
  AllVote(members);
  EXPECT_EQ(Poll(*members[0], 9), "1 0 6 2 finished 0.0 1.0");
  EXPECT_EQ(Poll(*members[0], 2), "2 1 6 2 lost 0.0");
}

TEST_F(MembershipLossesTest, PollsBeat) {
  auto members = Founded(2);
  for (int second = 0; second < 60; ++second) {
    EXPECT_EQ(Poll(*members[0]), "0 0 5 2 founded 0.0 1.0*");
    EXPECT_EQ(Poll(*members[1]), "0 0 5 2 founded 0.0 1.0*");
    now_ += absl::Seconds(1);
  }
}

TEST_F(MembershipLossesTest, WhoSleptOrWasCutOffCountsFromThenOn) {
  auto members = Founded(2);
  for (const double jump : {1000.0, -5000.0, 5.1}) {
    EXPECT_EQ(Poll(*members[0], 4), "0 0 5 2 founded 0.0 1.0*");
    now_ += absl::Seconds(jump);
    EXPECT_EQ(Poll(*members[0], 4), "0 0 5 2 founded 0.0 1.0*");
    EXPECT_EQ(Poll(*members[1]), "0 0 5 2 founded 0.0 1.0*");
  }
  EXPECT_EQ(Poll(*members[0], 1), "0 0 5 2 founded 0.0 1.0*");
  registers_.is_away = true;
  for (int second = 0; second < 30; ++second) {
    EXPECT_THAT(members[0]->Poll(),
                StatusIs(absl::StatusCode::kUnavailable, _));
    now_ += absl::Seconds(1);
  }
  registers_.is_away = false;
  EXPECT_EQ(Poll(*members[0], 9), "0 0 5 2 founded 0.0 1.0*");
  EXPECT_EQ(Poll(*members[0], 2), "1 1 5 2 lost 0.0");
}

TEST_F(MembershipLossesTest, AClockThatGoesBackHidesNobody) {
  auto members = Founded(2);
  EXPECT_EQ(Poll(*members[0], 1), "0 0 5 2 founded 0.0 1.0*");
  now_ -= absl::Seconds(5000);
  EXPECT_EQ(Poll(*members[0], 9), "0 0 5 2 founded 0.0 1.0*");
  EXPECT_EQ(Poll(*members[0], 2), "1 1 5 2 lost 0.0");
}

TEST_F(MembershipLossesTest, HalfTheTimeoutIsNoGap) {
  auto members = Founded(2);
  EXPECT_EQ(Poll(*members[0], 1), "0 0 5 2 founded 0.0 1.0*");
  now_ += absl::Seconds(5);
  Poll(*members[0]);
  now_ += absl::Seconds(5);
  EXPECT_EQ(Poll(*members[0]), "1 1 5 2 lost 0.0");
}

TEST_F(MembershipLossesTest, AGapIsNoPartOfAFoundingsTime) {
  auto first = Of(0);
  EXPECT_OK(first->Request(0));
  EXPECT_EQ(Poll(*first, 10), Encode(Roster{}));
  now_ += absl::Seconds(1000);
  EXPECT_EQ(Poll(*first, 19), Encode(Roster{}));
  EXPECT_EQ(Poll(*first, 1), "0 0 0 1 founded 0.0");
}

TEST_F(MembershipLossesTest, WhoIsSlowIsLostOnlyIfAsked) {
  options_.step_timeout = absl::Seconds(20);
  auto members = Founded(3);
  const Roster roster = members[0]->latest();
  const auto poll_all = [&](int seconds) {
    for (int second = 0; second < seconds; ++second) {
      now_ += absl::Seconds(1);
      for (auto& member : members) Poll(*member);
    }
    return Poll(*members[0]);
  };
  EXPECT_EQ(poll_all(40), Encode(roster));  // nobody has voted
  EXPECT_OK(members[0]->VoteFor(roster));
  EXPECT_EQ(poll_all(10), Encode(roster));
  EXPECT_OK(members[2]->VoteFor(roster));
  EXPECT_EQ(poll_all(9), Encode(roster));
  EXPECT_EQ(poll_all(1), "1 1 5 3 lost 0.0 2.0*");
}

TEST_F(MembershipLossesTest, NobodyIsTooSlowWhoAloneHasTheState) {
  options_.step_timeout = absl::Seconds(4);
  auto members = Founded(2);
  const Roster roster = members[0]->latest();
  EXPECT_OK(members[1]->VoteFor(roster));
  for (int second = 0; second < 30; ++second) {
    now_ += absl::Seconds(1);
    Poll(*members[0]);
    EXPECT_EQ(Poll(*members[1]), Encode(roster));
  }
}

TEST_F(MembershipLossesTest, AGapIsNoPartOfAStepsTime) {
  options_.step_timeout = absl::Seconds(8);
  auto members = Founded(2);
  const Roster roster = members[0]->latest();
  EXPECT_OK(members[0]->VoteFor(roster));
  Poll(*members[0]);
  now_ += absl::Seconds(1000);
  EXPECT_EQ(Poll(*members[0], 7), Encode(roster));
  EXPECT_EQ(Poll(*members[0], 1), "1 1 5 2 lost 0.0");
}

TEST_F(MembershipLossesTest, WithoutTheStateAllBeginAnew) {
  auto members = Founded(2);
  const Roster roster = members[0]->latest();
  EXPECT_OK(members[0]->Leave());
  EXPECT_EQ(Poll(*members[1]), "1 1 5 2 lost");
  EXPECT_THAT(members[1]->Next(roster),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("requests to found anew")));
  EXPECT_OK(members[1]->Request(2));
  EXPECT_THAT(members[1]->AwaitMembership(now_),
              StatusIs(absl::StatusCode::kDeadlineExceeded, _));
  auto again = Of(0, 1);
  EXPECT_OK(again->Request(4));
  ASSERT_OK_AND_ASSIGN(const Roster founded, again->AwaitMembership(now_));
  EXPECT_EQ(Encode(founded), "2 2 4 5 founded 0.1 1.0*");
}

TEST_F(MembershipLossesTest, EveryFoundingHasItsTime) {
  auto first = Of(0);
  EXPECT_OK(first->Request(0));
  EXPECT_EQ(Poll(*first, 20), "0 0 0 1 founded 0.0");
  EXPECT_EQ(Poll(*first, 100), "0 0 0 1 founded 0.0");
  auto again = Of(0, 1);
  EXPECT_OK(again->Request(0));
  EXPECT_EQ(Poll(*first), "1 1 0 1 lost");
  EXPECT_EQ(Poll(*first, 19), "1 1 0 1 lost");
  EXPECT_EQ(Poll(*first, 1), "2 2 0 2 founded 0.1");
}

}  // namespace
}  // namespace fsdp::replicas
