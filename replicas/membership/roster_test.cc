#include "replicas/membership/roster.h"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::replicas {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Roster Read(const std::string& text) {
  const absl::StatusOr<Roster> roster = DecodeRoster(text);
  EXPECT_OK(roster);
  return roster.value_or(Roster{});
}

Notice Join(int replica, int incarnation, int64_t first_step = 0) {
  return {Notice::Kind::kJoin, {replica, incarnation}, first_step};
}

Notice Leave(int replica, int incarnation) {
  return {Notice::Kind::kLeave, {replica, incarnation}, 0};
}

std::vector<std::string> Texts(const std::vector<Notice>& notices) {
  std::vector<std::string> texts;
  texts.reserve(notices.size());
  for (const Notice& notice : notices) texts.push_back(Encode(notice));
  return texts;
}

std::vector<std::string> Texts(const std::vector<ReplicaId>& ids) {
  std::vector<std::string> texts;
  texts.reserve(ids.size());
  for (const ReplicaId& id : ids) texts.push_back(ToString(id));
  return texts;
}

TEST(WaitingTest, TheLastJoinOfEachReplica) {
  EXPECT_THAT(Waiting({}), IsEmpty());
  EXPECT_THAT(Texts(Waiting({Join(3, 0, 1), Join(0, 0, 2), Join(3, 0, 4)})),
              ElementsAre("join 0.0 2", "join 3.0 4"));
}

TEST(WaitingTest, ALargerIncarnationEndsSmallerOnes) {
  EXPECT_THAT(Texts(Waiting({Join(1, 0), Join(1, 2), Join(1, 1)})),
              ElementsAre("join 1.2 0"));
  // One that has left does not wait, even if it is known only by that.
  EXPECT_THAT(Waiting({Join(1, 0), Join(1, 2), Leave(1, 2)}), IsEmpty());
  EXPECT_THAT(Waiting({Leave(1, 1), Join(1, 0)}), IsEmpty());
}

TEST(WaitingTest, ALeaveEndsItsIncarnationOnly) {
  EXPECT_THAT(Waiting({Join(1, 0), Leave(1, 0)}), IsEmpty());
  EXPECT_THAT(Waiting({Leave(1, 0), Join(1, 0)}), IsEmpty());
  EXPECT_THAT(Texts(Waiting({Leave(1, 0), Join(1, 1), Join(0, 0)})),
              ElementsAre("join 0.0 0", "join 1.1 0"));
}

TEST(GoneTest, WhoLeftAndWhoIsReplaced) {
  const Roster roster = Read("4 2 3 5 finished 0.0 1.1 2.0*");
  EXPECT_THAT(Gone(roster, {}), IsEmpty());
  EXPECT_THAT(Texts(Gone(roster, {Leave(2, 0), Join(1, 2)})),
              ElementsAre("1.1", "2.0"));
  // A late notice of a life before, a request made twice, and somebody else's.
  EXPECT_THAT(Gone(roster, {Leave(1, 0), Join(1, 0), Join(1, 1), Join(3, 9)}),
              IsEmpty());
}

TEST(FoundTest, TheFurthestGivesItsState) {
  const Roster roster =
      Found(Roster{}, {Join(2, 0, 7), Join(0, 1, 3), Join(5, 0, 7)}, 4);
  EXPECT_EQ(Encode(roster), "0 0 7 4 founded 0.1* 2.0 5.0*");
  EXPECT_EQ(ToString(Donor(roster)->id), "2.0");
}

TEST(AfterStepTest, WhoWaitsIsNew) {
  const Roster roster = Read("4 2 3 5 finished 1.0");
  const Roster next = AfterStep(roster, {Join(3, 0, 9), Join(0, 2, 1)}, 7);
  EXPECT_EQ(Encode(next), "5 3 4 7 finished 0.2* 1.0 3.0*");
  EXPECT_EQ(ToString(Donor(next)->id), "1.0");
}

TEST(AfterStepTest, AnIncarnationReplacesTheOneBefore) {
  const Roster roster = Read("4 2 3 5 finished 0.0 1.1 2.0");
  EXPECT_EQ(Encode(AfterStep(roster, {Join(1, 2)}, 6)),
            "5 3 4 6 finished 0.0 1.2* 2.0");
  EXPECT_EQ(Encode(AfterStep(roster, {Join(1, 0), Join(1, 1)}, 7)),
            "5 2 4 7 finished 0.0 1.1 2.0");
}

TEST(AfterStepTest, NobodyJoinsWhereNobodyStays) {
  // A notice that waits is for the founding that follows.
  const Roster roster = Read("4 2 3 5 finished 0.0");
  EXPECT_EQ(Encode(AfterStep(roster, {Join(0, 1, 4), Join(1, 0, 4)}, 7)),
            "5 3 4 5 finished");
}

TEST(AfterStepTest, WhoLeftIsNoLongerThere) {
  const Roster roster = Read("4 2 3 5 finished 0.0 1.1 2.0");
  EXPECT_EQ(Encode(AfterStep(roster, {Leave(0, 0), Leave(2, 0)}, 7)),
            "5 3 4 7 finished 1.1");
}

TEST(WithoutTest, TheSameStepWithFewer) {
  const Roster roster = Read("4 2 3 5 finished 0.0 1.1 2.0* 3.0*");
  EXPECT_EQ(Encode(Without(roster, {{1, 1}, {2, 0}, {1, 1}})),
            "5 3 3 5 lost 0.0 3.0*");
  // This one is of another life.
  EXPECT_EQ(Encode(Without(roster, {{0, 0}, {1, 0}})),
            "5 3 3 5 lost 1.1 2.0* 3.0*");
}

TEST(WithoutTest, NewOnesAloneHaveNothingToComputeWith) {
  const Roster roster = Read("4 2 3 5 finished 0.0 1.1*");
  EXPECT_EQ(Encode(Without(roster, {{0, 0}})), "5 3 3 5 lost");
  EXPECT_EQ(Donor(Without(roster, {{0, 0}})), nullptr);
}

TEST(RosterTest, AnyDifferenceIsOne) {
  const Roster roster = Read("4 2 3 5 finished 0.0 1.1");
  EXPECT_EQ(roster, Read("4 2 3 5 finished 0.0 1.1"));
  for (const char* const other :
       {"5 2 3 5 finished 0.0 1.1", "4 3 3 5 finished 0.0 1.1",
        "4 2 4 5 finished 0.0 1.1", "4 2 3 6 finished 0.0 1.1",
        "4 2 3 5 lost 0.0 1.1", "4 2 3 5 finished 0.0",
        "4 2 3 5 finished 0.0 1.2", "4 2 3 5 finished 0.0 2.1",
        "4 2 3 5 finished 0.0 1.1*"}) {
    EXPECT_NE(roster, Read(other)) << other;
  }
}

TEST(CodecTest, LimitsAreIncluded) {
  const std::string most =
      std::to_string(std::numeric_limits<int64_t>::max() / 2);
  const std::string text = most + " " + most + " " + most + " " + most +
                           " lost 0.0 1023.2147483647*";
  EXPECT_EQ(Encode(Read(text)), text);
  EXPECT_EQ(Encode(Read("1 0 0 0 lost")), "1 0 0 0 lost");
}

TEST(CodecTest, EveryReplicaAtOnceFits) {
  std::string text = "1 0 0 0 lost";
  for (int i = 0; i < kMaxReplicas; ++i) {
    text += " " + ToString({i, 2147483647});
  }
  EXPECT_EQ(Read(text).members.size(), 1024u);
}

TEST(CodecTest, WhatNoRuleMakesIsRefused) {
  const std::string cases[][2] = {
      {"", "too short"},
      {"1 0 0 0", "too short"},
      {"1 0 0 0 lost ", "member"},
      {"1 0 0 0 found 0.0", "cause"},
      {"-1 -1 0 0 lost", "number"},
      {"1 0 x 0 lost", "number"},
      {"1 0 4611686018427387904 0 lost", "number"},
      {"1 0 99999999999999999999 0 lost", "number"},
      {"1 2 0 0 lost", "epoch"},
      {"1 0 0 0 lost 1.0 0.0", "order"},
      {"1 0 0 0 lost 1.0 1.1", "order"},
      {"1 0 0 0 lost 1024.0", "member"},
      {"1 0 0 0 lost -1.0", "member"},
      {"1 0 0 0 lost 0.-1", "member"},
      {"1 0 0 0 lost 0.2147483648", "member"},
      {"1 0 0 0 lost 0", "member"},
      {"1 0 0 0 lost 0.0.0", "member"},
      {"1 0 0 0 lost 0.0**", "member"},
      {"1 0 0 0 lost 00.0", "member"},
      {"1 0 0 0 lost 0.0* 1.0*", "new"},
      {"1 0 0 0 founded", "donor"},
      {"1 0 0 0 founded 0.0 1.0", "donor"},
      {"0 0 1 0 finished 0.0", "founding"},
      {"1 0 0 0 finished 0.0", "finished"},
      {"01 0 0 0 lost", "otherwise"},
      {"+1 0 0 0 lost", "otherwise"},
  };
  for (const auto& [text, why] : cases) {
    EXPECT_THAT(DecodeRoster(text),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)))
        << text;
  }
  EXPECT_THAT(DecodeRoster(std::string(kMaxRosterBytes + 1, '1')),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("long")));
}

TEST(CodecTest, NoticesComeBack) {
  for (const std::string text : {"join 2.1 100", "join 0.0 0", "leave 2.1"}) {
    ASSERT_OK_AND_ASSIGN(const Notice notice, DecodeNotice(text));
    EXPECT_EQ(Encode(notice), text);
  }
  for (const std::string text :
       {"", "join", "join 2.1", "join 2.1 -1", "join 2.1 1 ", "join 2 1",
        "leave 2.1 0", "leave", "leave 2.1 ", "stay 2.1 1", "join 2.1 07",
        "join 2.1 4611686018427387904"}) {
    EXPECT_THAT(DecodeNotice(text),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  }
}

TEST(DescribeTest, SaysAllThatMatters) {
  EXPECT_EQ(Describe(Roster{}), "no entry yet");
  EXPECT_EQ(Describe(Read("7 2 3 5 lost 0.1 2.0*")),
            "entry 7 (step 3, epoch 2, lost): 0.1 2.0(new)");
  EXPECT_EQ(Describe(Read("7 2 3 5 lost")),
            "entry 7 (step 3, epoch 2, lost): nobody");
}

}  // namespace
}  // namespace fsdp::replicas
