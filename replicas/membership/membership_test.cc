#include "replicas/membership/membership.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/match.h"
#include "base/testing/status_matchers.h"
#include "replicas/membership/testing/memory_registers.h"

namespace fsdp::replicas {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::_;
using ::testing::AllOf;
using ::testing::HasSubstr;

// Waits pass at once; other calls can fail.
class SteeredRegisters final : public testing::ForwardingRegisters {
 public:
  SteeredRegisters(Registers* base, absl::Time* now)
      : ForwardingRegisters(base), now_(now) {}
  absl::StatusOr<std::optional<std::string>> Get(
      const std::string& key) override {
    if (is_away) return absl::UnavailableError("away");
    ++gets;
    return ForwardingRegisters::Get(key);
  }
  absl::Status Set(const std::string& key, const std::string& value) override {
    if (is_away || sets_fail) return absl::UnavailableError("away");
    if (absl::StartsWith(key, "membership/notice/")) ++notices;
    return ForwardingRegisters::Set(key, value);
  }
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t addend) override {
    ++adds;
    return ForwardingRegisters::Add(key, addend);
  }
  absl::Status Await(const std::string& key, absl::Time deadline) override {
    ++waits;
    if (meanwhile) meanwhile();
    const absl::StatusOr<bool> there = HasAll({key});
    if (*there && !is_away) return absl::OkStatus();
    *now_ = std::max(*now_, deadline);
    if (is_away) return absl::UnavailableError("away");
    return absl::DeadlineExceededError("waited");
  }

  bool is_away = false;
  bool sets_fail = false;
  int gets = 0;
  int adds = 0;
  int notices = 0;  // that were written
  int waits = 0;
  std::function<void()> meanwhile;

 private:
  absl::Time* const now_;
};

class MembershipTest : public ::testing::Test {
 protected:
  MembershipTest() {
    options_.replicas = 2;
    options_.found_timeout = absl::Seconds(20);
    options_.loss_timeout = absl::Seconds(10);
    options_.now = [this] { return now_; };
  }

  std::unique_ptr<Membership> Of(int replica, int incarnation = 0) {
    MembershipOptions options = options_;
    options.self = {replica, incarnation};
    auto membership = Membership::Create(options, &registers_);
    EXPECT_OK(membership);
    return *std::move(membership);
  }

  // Returns the newest entry after `membership` has polled for `seconds`.
  std::string Poll(Membership& membership, double seconds = 0) {
    const absl::Time end = now_ + absl::Seconds(seconds);
    while (true) {
      const absl::StatusOr<Roster> roster = membership.Poll();
      EXPECT_OK(roster);
      if (now_ >= end) return Encode(*roster);
      now_ += absl::Seconds(1);
    }
  }

  // Returns replicas 0 to `count` - 1, founded with step 5.
  std::vector<std::unique_ptr<Membership>> Founded(int count) {
    options_.replicas = count;
    std::vector<std::unique_ptr<Membership>> members;
    for (int replica = 0; replica < count; ++replica) {
      members.push_back(Of(replica));
      EXPECT_OK(members.back()->Request(5));
    }
    Poll(*members[0]);
    for (auto& member : members) Poll(*member);
    EXPECT_EQ(members[0]->latest().members.size(), count);
    return members;
  }

  void AllVote(std::vector<std::unique_ptr<Membership>>& members) {
    const Roster roster = *members[0]->Poll();
    for (auto& member : members) EXPECT_OK(member->VoteFor(roster));
  }

  absl::Time now_ = absl::UnixEpoch();
  MembershipOptions options_;
  testing::MemoryRegisters memory_;
  SteeredRegisters registers_{&memory_, &now_};
};

TEST_F(MembershipTest, OptionsAreChecked) {
  const std::pair<std::function<void(MembershipOptions&)>, std::string>
      cases[] = {
          {[](auto& o) { o.self.replica = -1; }, "range"},
          {[](auto& o) { o.self.replica = kMaxReplicas; }, "range"},
          {[](auto& o) { o.self.incarnation = -1; }, "range"},
          {[](auto& o) { o.rank = -1; }, "rank"},
          {[](auto& o) { o.rank = o.ranks_per_replica; }, "rank"},
          {[](auto& o) { o.replicas = 0; }, "replicas"},
          {[](auto& o) { o.replicas = kMaxReplicas + 1; }, "replicas"},
          {[](auto& o) { o.beat_interval = absl::ZeroDuration(); }, "beat"},
          {[](auto& o) { o.beat_interval = absl::Seconds(2.6); }, "beat"},
          {[](auto& o) { o.steps = -1; }, "steps"},
          {[](auto& o) { o.step_timeout = -absl::Seconds(1); }, "timeouts"},
          {[](auto& o) { o.found_timeout = -absl::Seconds(1); }, "timeouts"},
          {[](auto& o) { o.log_entries = 1; }, "log_entries"},
      };
  for (const auto& [change, what] : cases) {
    MembershipOptions options = options_;
    change(options);
    EXPECT_THAT(Membership::Create(options, &registers_),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(what)));
  }
  options_.beat_interval = absl::Seconds(2.5);
  options_.self.replica = kMaxReplicas - 1;
  EXPECT_OK(Membership::Create(options_, &registers_));
}

TEST_F(MembershipTest, AllAreFoundedAtOnce) {
  auto first = Of(0);
  auto second = Of(1);
  EXPECT_EQ(first->latest().number, -1);
  EXPECT_OK(first->Request(3));
  EXPECT_THAT(first->AwaitMembership(now_),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("0.0 has not become a member in time: no "
                                 "entry yet")));
  EXPECT_OK(second->Request(4));
  ASSERT_OK_AND_ASSIGN(const Roster roster, second->AwaitMembership(now_));
  EXPECT_EQ(Encode(roster), "0 0 4 2 founded 0.0* 1.0");
  ASSERT_OK_AND_ASSIGN(const Roster seen, first->AwaitMembership(now_));
  EXPECT_EQ(Encode(seen), Encode(roster));
  EXPECT_EQ(Encode(first->latest()), Encode(roster));
}

TEST_F(MembershipTest, WhoVotesLastMakesTheEntry) {
  auto members = Founded(3);
  const Roster roster = members[0]->latest();
  EXPECT_OK(members[0]->VoteFor(roster));
  EXPECT_OK(members[2]->VoteFor(roster));
  EXPECT_OK(members[2]->VoteFor(roster));
  EXPECT_EQ(Poll(*members[0]), "0 0 5 3 founded 0.0 1.0* 2.0*");
  ASSERT_OK_AND_ASSIGN(auto next, members[0]->Next(roster));
  EXPECT_EQ(next, std::nullopt);
  EXPECT_OK(members[1]->VoteFor(roster));
  ASSERT_OK_AND_ASSIGN(next, members[0]->Next(roster));
  EXPECT_EQ(Encode(*next), "1 0 6 3 finished 0.0 1.0 2.0");
}

TEST_F(MembershipTest, AVoterThatEndsBeforeTheEntryIsNotMissed) {
  auto members = Founded(2);
  const Roster roster = members[0]->latest();
  EXPECT_OK(members[0]->VoteFor(roster));
  ASSERT_OK(memory_.Set("membership/vote/0/1.0/0", "1"));
  EXPECT_EQ(Poll(*members[0]), "1 0 6 2 finished 0.0 1.0");
}

TEST_F(MembershipTest, AVoteForWhatIsPastChangesNothing) {
  auto members = Founded(2);
  const Roster roster = members[0]->latest();
  AllVote(members);
  const Roster next = *members[0]->Poll();
  EXPECT_OK(members[0]->VoteFor(next));
  EXPECT_OK(members[0]->VoteFor(roster));
  EXPECT_OK(members[1]->VoteFor(roster));
  EXPECT_EQ(Poll(*members[0]), Encode(next));
  // The vote for `next` stands.
  EXPECT_OK(members[1]->VoteFor(next));
  EXPECT_EQ(Poll(*members[0]), "2 0 7 2 finished 0.0 1.0");
}

TEST_F(MembershipTest, OnlyMembersVote) {
  auto members = Founded(2);
  EXPECT_THAT(Of(2)->VoteFor(members[0]->latest()),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("replica 2.0 is no member of entry 0")));
}

TEST_F(MembershipTest, OneRequestHasOneNumber) {
  auto members = Founded(1);
  auto late = Of(3);
  registers_.adds = 0;
  registers_.sets_fail = true;
  EXPECT_THAT(late->Request(0), StatusIs(absl::StatusCode::kUnavailable, _));
  registers_.sets_fail = false;
  EXPECT_OK(late->Request(0));
  EXPECT_FALSE(late->AwaitMembership(now_).ok());
  EXPECT_FALSE(late->AwaitMembership(now_).ok());
  EXPECT_EQ(registers_.adds, 1);
  EXPECT_EQ(registers_.notices, 1 + 1);  // one is the other replica's
  AllVote(members);
  EXPECT_EQ(Poll(*late), "1 1 6 2 finished 0.0 3.0*");
  EXPECT_OK(late->AwaitMembership(now_));
  EXPECT_OK(late->Request(0));  // it is a member
  EXPECT_EQ(registers_.adds, 1);
}

TEST_F(MembershipTest, NobodyRequestsAgainUnasked) {
  // The state that was requested with has been trained since.
  auto members = Founded(2);
  EXPECT_OK(members[1]->AwaitMembership(now_));
  EXPECT_OK(TellGone(memory_, {1, 0}));
  EXPECT_EQ(Poll(*members[0]), "1 1 5 2 lost 0.0");
  EXPECT_OK(members[0]->VoteFor(*members[0]->Poll()));
  EXPECT_FALSE(members[1]->AwaitMembership(now_).ok());
  EXPECT_OK(members[0]->VoteFor(*members[0]->Poll()));
  EXPECT_EQ(Poll(*members[0]), "3 1 7 3 finished 0.0");
  EXPECT_OK(members[1]->Request(6));
  EXPECT_OK(members[0]->VoteFor(*members[0]->Poll()));
  EXPECT_EQ(Poll(*members[0]), "4 2 8 4 finished 0.0 1.0*");
}

TEST_F(MembershipTest, AnIncarnationIsForOneStartOnly) {
  auto members = Founded(2);
  EXPECT_THAT(Of(1)->Request(5),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       HasSubstr("need a larger incarnation")));
}

TEST_F(MembershipTest, ANewIncarnationEndsTheOneBefore) {
  auto members = Founded(2);
  auto again = Of(1, 1);
  EXPECT_OK(again->Request(0));
  EXPECT_EQ(Poll(*members[0]), "1 1 5 2 lost 0.0");
  EXPECT_THAT(members[1]->Request(5),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       HasSubstr("1.0 has been replaced by its incarnation "
                                 "1")));
  EXPECT_OK(members[0]->VoteFor(members[0]->latest()));
  ASSERT_OK_AND_ASSIGN(const Roster roster, again->AwaitMembership(now_));
  EXPECT_EQ(Encode(roster), "2 2 6 3 finished 0.0 1.1*");
  EXPECT_THAT(members[1]->AwaitMembership(now_ + absl::Seconds(100)),
              StatusIs(absl::StatusCode::kAlreadyExists, _));
}

TEST_F(MembershipTest, AStepThatAllFinishedCountsForWhoIsReplacedWithIt) {
  auto members = Founded(2);
  auto again = Of(1, 1);
  const Roster roster = members[0]->latest();
  EXPECT_OK(members[0]->VoteFor(roster));
  EXPECT_OK(again->Request(0));
  EXPECT_OK(members[1]->VoteFor(roster));
  EXPECT_EQ(Poll(*members[0]), "1 1 6 3 finished 0.0 1.1*");
  EXPECT_THAT(members[1]->Next(roster),
              StatusIs(absl::StatusCode::kAlreadyExists, _));
}

TEST_F(MembershipTest, ARunEndsWithItsLastStep) {
  options_.steps = 6;
  auto members = Founded(2);
  EXPECT_FALSE(members[0]->HasEnded(members[0]->latest()));
  AllVote(members);
  EXPECT_TRUE(members[0]->HasEnded(*members[0]->Poll()));
  // All go, and nobody is missed.
  EXPECT_OK(TellGone(memory_, {1, 0}));
  EXPECT_EQ(Poll(*members[0], 30), "1 0 6 2 finished 0.0 1.0");
  auto late = Of(5);
  EXPECT_OK(late->Request(0));
  ASSERT_OK_AND_ASSIGN(const Roster end, late->AwaitMembership(now_));
  EXPECT_EQ(Encode(end), Encode(members[0]->latest()));
}

TEST_F(MembershipTest, WaitsLookForWhatIsDue) {
  auto members = Founded(2);
  const Roster roster = members[0]->latest();
  ASSERT_OK_AND_ASSIGN(const Roster next,
                       members[0]->AwaitNext(roster, now_ + absl::Seconds(60)));
  EXPECT_EQ(Encode(next), "1 1 5 2 lost 0.0");
  EXPECT_LE(now_, absl::UnixEpoch() + absl::Seconds(12));
}

TEST_F(MembershipTest, WaitsEndWithTheEntry) {
  auto members = Founded(2);
  const Roster roster = members[0]->latest();
  EXPECT_OK(members[0]->VoteFor(roster));
  registers_.meanwhile = [&] {
    EXPECT_OK(members[1]->VoteFor(roster));
    registers_.gets = 0;
  };
  const absl::Time before = now_;
  ASSERT_OK_AND_ASSIGN(const Roster next,
                       members[0]->AwaitNext(roster, now_ + absl::Seconds(60)));
  EXPECT_EQ(Encode(next), "1 0 6 2 finished 0.0 1.0");
  EXPECT_EQ(now_, before);
  EXPECT_EQ(registers_.waits, 1);
  EXPECT_EQ(registers_.gets, 1);  // the entry, and no poll
}

TEST_F(MembershipTest, ADeadlineNamesWhoIsMissing) {
  auto members = Founded(3);
  const Roster roster = members[0]->latest();
  EXPECT_OK(members[1]->VoteFor(roster));
  const absl::Time deadline = now_ + absl::Seconds(3);
  EXPECT_THAT(
      members[0]->AwaitNext(roster, deadline),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               AllOf(HasSubstr("after entry 0 (step 5"),
                     HasSubstr("not all ranks have voted of: 0.0, 2.0"))));
  EXPECT_EQ(now_, deadline);
}

TEST_F(MembershipTest, WaitsGoOnWhileTheKeeperIsAway) {
  options_.beat_interval = absl::Milliseconds(200);
  auto members = Founded(2);
  const Roster roster = members[0]->latest();
  registers_.is_away = true;
  EXPECT_THAT(members[0]->AwaitNext(roster, now_ + absl::Seconds(2)),
              StatusIs(absl::StatusCode::kUnavailable, _));
  auto late = Of(2);
  EXPECT_THAT(late->AwaitMembership(now_ + absl::Seconds(2)),
              StatusIs(absl::StatusCode::kUnavailable, _));
  EXPECT_THAT(late->Request(0), StatusIs(absl::StatusCode::kUnavailable, _));
  registers_.waits = 0;
  registers_.meanwhile = [&] { registers_.is_away = registers_.waits < 4; };
  EXPECT_THAT(members[0]->AwaitNext(roster, now_ + absl::Seconds(2)),
              StatusIs(absl::StatusCode::kDeadlineExceeded, _));
  EXPECT_GT(registers_.waits, 4);
}

TEST_F(MembershipTest, ALongRunKeepsNoMore) {
  options_.log_entries = 3;
  auto members = Founded(2);
  for (int step = 0; step < 5; ++step) AllVote(members);
  const size_t keys = memory_.size();
  for (int step = 0; step < 20; ++step) AllVote(members);
  EXPECT_EQ(memory_.size(), keys);
  for (int incarnation = 1; incarnation < 4; ++incarnation) {
    members[1] = Of(1, incarnation);
    EXPECT_OK(members[1]->Request(0));
    Poll(*members[0]);
    EXPECT_OK(members[0]->VoteFor(members[0]->latest()));
    Poll(*members[1]);
    AllVote(members);
  }
  // A life leaves the last vote and the last beat of each rank.
  EXPECT_LE(memory_.size(), keys + 6);
}

// Replicas leave, are silent, asleep or slow, and the others go on without
// them.

using MembershipLossesTest = MembershipTest;

TEST_F(MembershipLossesTest, WhoLeavesIsGoneAtOnce) {
  auto members = Founded(3);
  const Roster roster = members[0]->latest();
  EXPECT_OK(TellGone(memory_, {2, 0}));
  EXPECT_EQ(Poll(*members[0]), "1 1 5 3 lost 0.0 1.0*");
  EXPECT_THAT(members[2]->Next(roster),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("2.0 is no member of entry 1"),
                             HasSubstr("may request to join again"))));
  EXPECT_OK(TellGone(memory_, {1, 0}));
  EXPECT_EQ(Poll(*members[0]), "2 2 5 3 lost 0.0");
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

TEST_F(MembershipLossesTest, AFoundingsTimeBeginsWithItsRequests) {
  auto first = Of(0);
  EXPECT_OK(first->Request(0));
  EXPECT_EQ(Poll(*first, 10), Encode(Roster{}));
  EXPECT_OK(TellGone(memory_, {0, 0}));
  EXPECT_EQ(Poll(*first, 15), Encode(Roster{}));
  EXPECT_OK(Of(1)->Request(0));
  EXPECT_EQ(Poll(*first, 19), Encode(Roster{}));
  EXPECT_EQ(Poll(*first, 1), "0 0 0 3 founded 1.0");
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
  EXPECT_OK(TellGone(memory_, {0, 0}));
  EXPECT_EQ(Poll(*members[1]), "1 1 5 2 lost");
  EXPECT_THAT(members[1]->Next(roster),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("lost): nobody: all who held the training's "
                                 "state are gone. Whoever has one, from memory "
                                 "or a checkpoint, requests to found anew")));
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
