#include "replicas/membership/heartbeats.h"

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "replicas/membership/roster.h"
#include "replicas/membership/testing/forwarding_registers.h"
#include "replicas/membership/testing/memory_registers.h"

namespace fsdp::replicas {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

absl::Time At(double seconds) {
  return absl::UnixEpoch() + absl::Seconds(seconds);
}

Roster Members(const std::vector<ReplicaId>& ids) {
  Roster roster;
  roster.number = 0;
  for (const ReplicaId& id : ids) roster.members.push_back({id, false});
  return roster;
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

class HeartbeatsTest : public ::testing::Test {
 protected:
  Heartbeats Of(const ReplicaId& id, int rank, int ranks = 1) {
    HeartbeatOptions options;
    options.self = id;
    options.rank = rank;
    options.ranks_per_replica = ranks;
    options.interval = absl::Seconds(1);
    options.loss_timeout = absl::Seconds(10);
    return Heartbeats(options, &registers_);
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

TEST_F(HeartbeatsTest, WhoStopsIsSilentAfterTheTimeout) {
  Heartbeats listener = Of({0, 0}, 0);
  Heartbeats other = Of({1, 0}, 0);
  EXPECT_OK(other.Beat(At(0)));
  EXPECT_THAT(Silent(listener, both_, 5), IsEmpty());
  EXPECT_OK(other.Beat(At(5)));
  EXPECT_THAT(Silent(listener, both_, 6), IsEmpty());
  EXPECT_THAT(Silent(listener, both_, 15.9), IsEmpty());
  EXPECT_THAT(Silent(listener, both_, 17), ElementsAre("1.0"));
  // It is not silent once it beats again.
  EXPECT_OK(other.Beat(At(17)));
  EXPECT_THAT(Silent(listener, both_, 18), IsEmpty());
}

TEST_F(HeartbeatsTest, WhoNeverBeatIsSilentToo) {
  Heartbeats listener = Of({0, 0}, 0);
  EXPECT_THAT(Silent(listener, both_, 100), IsEmpty());
  EXPECT_THAT(Silent(listener, both_, 109.9), IsEmpty());
  EXPECT_THAT(Silent(listener, both_, 111), ElementsAre("1.0"));
}

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

TEST_F(HeartbeatsTest, NobodyWasSilentWhileNobodyListened) {
  Heartbeats listener = Of({0, 0}, 0);
  EXPECT_THAT(Silent(listener, both_, 100), IsEmpty());
  listener.Forget();
  // The clock may have gone back.
  EXPECT_THAT(Silent(listener, both_, 50), IsEmpty());
  EXPECT_THAT(Silent(listener, both_, 59), IsEmpty());
  EXPECT_THAT(Silent(listener, both_, 60), ElementsAre("1.0"));
  EXPECT_OK(listener.Beat(At(100)));
  listener.Forget();
  EXPECT_OK(listener.Beat(At(50)));
  ASSERT_OK_AND_ASSIGN(const auto beat, memory_.Get("membership/beat/0.0/0"));
  EXPECT_EQ(beat, "2");
}

TEST_F(HeartbeatsTest, WhoComesAgainIsHeardAnew) {
  Heartbeats listener = Of({0, 0}, 0);
  EXPECT_THAT(Silent(listener, both_, 0), IsEmpty());
  EXPECT_THAT(Silent(listener, Members({{0, 0}}), 5), IsEmpty());
  EXPECT_THAT(Silent(listener, both_, 11), IsEmpty());
  EXPECT_THAT(Silent(listener, both_, 20), IsEmpty());
  EXPECT_THAT(Silent(listener, both_, 21), ElementsAre("1.0"));
}

}  // namespace
}  // namespace fsdp::replicas
