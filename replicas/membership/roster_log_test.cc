#include "replicas/membership/roster_log.h"

#include <array>
#include <memory>

#include "base/testing/status_matchers.h"
#include "replicas/membership/testing/memory_registers.h"
#include "replicas/membership/testing/registers_contract.h"

namespace fsdp::replicas {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::_;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

// The fake keeps the contract of what it stands for.
using testing::RegistersContract;
INSTANTIATE_TEST_SUITE_P(
    Memory, RegistersContract,
    ::testing::Values([]() -> std::array<std::shared_ptr<Registers>, 2> {
      const auto memory = std::make_shared<testing::MemoryRegisters>();
      return {memory, memory};
    }));

Roster Numbered(int64_t number, int incarnation = 0) {
  return {number,
          /*epoch=*/0,
          /*step=*/number,
          /*notices_seen=*/0,
          number == 0 ? Cause::kFounded : Cause::kFinished,
          {{{0, incarnation}, false}}};
}

TEST(RosterLogTest, RegistersThatForgotAreNoticed) {
  testing::MemoryRegisters registers;
  RosterLog log(&registers, /*entries=*/2);
  for (const int64_t number : {0, 1}) ASSERT_OK(log.Propose(Numbered(number)));
  ASSERT_OK(registers.Remove("membership/log/0"));
  EXPECT_THAT(log.Propose(Numbered(2)),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("has lost entry 0")));
}

// Other processes make entries between this one's look and its exchange.
class Overtaken final : public testing::ForwardingRegisters {
 public:
  using ForwardingRegisters::ForwardingRegisters;
  absl::StatusOr<std::string> CompareAndSet(const std::string& key,
                                            const std::string& expected,
                                            const std::string& value) override {
    RosterLog log(base(), /*entries=*/2);
    for (; next <= last; ++next) EXPECT_OK(log.Propose(Numbered(next)));
    return base()->CompareAndSet(key, expected, value);
  }
  int64_t next = 0;
  int64_t last = 0;
};

TEST(RosterLogTest, WhoWasOvertakenByOneOrManyMakesNothing) {
  for (const int64_t last : {0, 2, 4}) {
    testing::MemoryRegisters base;
    Overtaken registers(&base);
    registers.last = last;
    RosterLog log(&registers, /*entries=*/2);
    EXPECT_THAT(*log.Propose(Numbered(0, 9)), false);
    ASSERT_OK_AND_ASSIGN(const Roster newest, log.Newest(Roster{}));
    EXPECT_EQ(Encode(newest), Encode(Numbered(last)));
  }
}

TEST(RosterLogTest, WhatIsNoRosterIsAnError) {
  testing::MemoryRegisters registers;
  RosterLog log(&registers, /*entries=*/2);
  ASSERT_OK(registers.Set("membership/log/0", "text"));
  EXPECT_THAT(log.Entry(0), StatusIs(absl::StatusCode::kInvalidArgument,
                                     HasSubstr("membership/log/0: ")));
  EXPECT_THAT(log.Propose(Numbered(0)),
              StatusIs(absl::StatusCode::kInvalidArgument, _));
}

Notice Join(int replica) {
  return {Notice::Kind::kJoin, {replica, 0}, replica + 10};
}

std::vector<std::string> Texts(const NoticeBoard::Pending& pending) {
  std::vector<std::string> texts;
  texts.reserve(pending.notices.size());
  for (const Notice& notice : pending.notices) texts.push_back(Encode(notice));
  return texts;
}

class ListeningRegisters final : public testing::ForwardingRegisters {
 public:
  using ForwardingRegisters::ForwardingRegisters;
  absl::StatusOr<std::optional<std::string>> Get(
      const std::string& key) override {
    heard.push_back(key);
    return ForwardingRegisters::Get(key);
  }
  std::vector<std::string> heard;
};

class NoticeBoardTest : public ::testing::Test {
 protected:
  void Post(int replica) {
    ASSERT_OK_AND_ASSIGN(const int64_t number, others_.Reserve());
    ASSERT_OK(others_.Write(number, Join(replica)));
  }

  testing::MemoryRegisters memory_;
  ListeningRegisters registers_{&memory_};
  NoticeBoard board_{&registers_};
  NoticeBoard others_{&memory_};
};

TEST_F(NoticeBoardTest, EachIsAskedForOnce) {
  Post(0);
  Post(1);
  ASSERT_OK(board_.ReadAfter(0));
  Post(2);
  registers_.heard.clear();
  ASSERT_OK_AND_ASSIGN(const auto pending, board_.ReadAfter(1));
  EXPECT_THAT(Texts(pending), ElementsAre("join 1.0 11", "join 2.0 12"));
  EXPECT_EQ(registers_.heard.size(), 2);  // how many there are, and the last
}

TEST_F(NoticeBoardTest, WhatIsNoNoticeIsLeftOut) {
  Post(0);
  ASSERT_OK(memory_.Set("membership/notice/1", "text"));
  ASSERT_OK_AND_ASSIGN(const auto pending, board_.ReadAfter(0));
  EXPECT_THAT(Texts(pending), IsEmpty());
  EXPECT_EQ(pending.seen, 1);
}

TEST_F(NoticeBoardTest, ManyComeInParts) {
  ASSERT_OK(memory_.Add("membership/notices", 5000));
  ASSERT_OK_AND_ASSIGN(auto pending, board_.ReadAfter(10));
  EXPECT_EQ(pending.seen, 4106);
  ASSERT_OK_AND_ASSIGN(pending, board_.ReadAfter(pending.seen));
  EXPECT_EQ(pending.seen, 5000);
}

TEST_F(NoticeBoardTest, RegistersThatForgotAreNoticed) {
  Post(0);
  EXPECT_OK(board_.ReadAfter(1));
  EXPECT_THAT(board_.ReadAfter(2),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("has lost what it kept: 1 notices, of which "
                                 "2 were read before")));
  ASSERT_OK(memory_.Set("membership/notices", "text"));
  EXPECT_THAT(board_.ReadAfter(0), StatusIs(absl::StatusCode::kInvalidArgument,
                                            HasSubstr("membership/notices")));
}

absl::Time At(double seconds) {
  return absl::UnixEpoch() + absl::Seconds(seconds);
}

Roster Members(const std::vector<ReplicaId>& ids) {
  Roster roster;
  roster.number = 0;
  for (const ReplicaId& id : ids) roster.members.push_back({id, false});
  return roster;
}

class HeartbeatsTest : public ::testing::Test {
 protected:
  Heartbeats Of(const ReplicaId& id, int rank, int ranks = 1) {
    return Heartbeats({id, rank, ranks, /*interval=*/absl::Seconds(1),
                       /*loss_timeout=*/absl::Seconds(10)},
                      &registers_);
  }
  std::vector<std::string> Silent(Heartbeats& heartbeats, const Roster& roster,
                                  double seconds) {
    std::vector<std::string> texts;
    const auto silent = heartbeats.Silent(roster, At(seconds));
    EXPECT_OK(silent);
    for (const ReplicaId& id : *silent) texts.push_back(ToString(id));
    return texts;
  }

  testing::MemoryRegisters memory_;
  ListeningRegisters registers_{&memory_};
  const Roster both_ = Members({{0, 0}, {1, 0}});
};

TEST_F(HeartbeatsTest, BeatsAndListensOncePerInterval) {
  Heartbeats listener = Of({0, 0}, 0);
  EXPECT_OK(listener.Beat(At(0)));
  ASSERT_OK_AND_ASSIGN(const auto first, memory_.Get("membership/beat/0.0/0"));
  EXPECT_OK(listener.Beat(At(0.9)));
  ASSERT_OK_AND_ASSIGN(auto now, memory_.Get("membership/beat/0.0/0"));
  EXPECT_EQ(now, first);
  EXPECT_OK(listener.Beat(At(1)));
  ASSERT_OK_AND_ASSIGN(now, memory_.Get("membership/beat/0.0/0"));
  EXPECT_NE(now, first);

  Silent(listener, both_, 0);
  Silent(listener, both_, 0.9);
  EXPECT_EQ(registers_.heard.size(), 1u);
  Silent(listener, both_, 1);
  EXPECT_EQ(registers_.heard.size(), 2u);
}

TEST_F(HeartbeatsTest, ListensToItsReplicaAndItsColumn) {
  const Roster three = Members({{0, 0}, {1, 4}, {2, 0}});
  Heartbeats member = Of({1, 4}, 1, /*ranks=*/3);
  Silent(member, three, 0);
  EXPECT_THAT(
      registers_.heard,
      UnorderedElementsAre("membership/beat/0.0/1", "membership/beat/2.0/1",
                           "membership/beat/1.4/0", "membership/beat/1.4/2"));
  registers_.heard.clear();
  Heartbeats waiting = Of({1, 5}, 2, /*ranks=*/3);
  Silent(waiting, three, 0);
  EXPECT_THAT(registers_.heard, UnorderedElementsAre("membership/beat/0.0/2",
                                                     "membership/beat/1.4/2",
                                                     "membership/beat/2.0/2"));
}

TEST_F(HeartbeatsTest, OneSilentRankIsEnough) {
  const Roster own = Members({{1, 0}});
  Heartbeats listener = Of({1, 0}, 0, /*ranks=*/3);
  Heartbeats other = Of({1, 0}, 2, /*ranks=*/3);
  for (int second = 0; second < 10; ++second) {
    EXPECT_OK(other.Beat(At(second)));
    EXPECT_THAT(Silent(listener, own, second), IsEmpty());
  }
  EXPECT_THAT(Silent(listener, own, 10), ElementsAre("1.0"));
}

TEST_F(HeartbeatsTest, WhoComesAgainIsHeardAnew) {
  Heartbeats listener = Of({0, 0}, 0);
  EXPECT_THAT(Silent(listener, both_, 0), IsEmpty());
  EXPECT_THAT(Silent(listener, Members({{0, 0}}), 5), IsEmpty());
  EXPECT_THAT(Silent(listener, both_, 11), IsEmpty());
  // The clock may have gone back since.
  EXPECT_OK(listener.Beat(At(100)));
  listener.Forget();
  EXPECT_OK(listener.Beat(At(5)));
  ASSERT_OK_AND_ASSIGN(const auto beat, memory_.Get("membership/beat/0.0/0"));
  EXPECT_EQ(beat, "2");
}

}  // namespace
}  // namespace fsdp::replicas
