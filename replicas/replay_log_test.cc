#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "replicas/live_log.h"
#include "replicas/membership/history.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kSteps = 20;

// Replica 1 is lost twice, replica 2 for good.
constexpr char kHistory[] =
    "epoch 0 founded at step 0 by 0.1: replicas 0.1 1.1 2.1\n"
    "epoch 1 within step 3: replicas 0.1 2.1\n"
    "epoch 2 from step 5: replicas 0.1 1.3 2.1\n"
    "epoch 3 within step 8: replicas 0.1 1.3\n";

absl::StatusOr<Roster> Enter(const ReplicaId& self, int64_t steps = kSteps) {
  absl::StatusOr<History> history = History::Parse(kHistory);
  if (!history.ok()) return history.status();
  return ReplayLog(*history, self, steps).Enter(/*first_step=*/0);
}

TEST(ReplayLogTest, ALifeEntersWhereItsFirstStepIs) {
  for (const ReplicaId self : {ReplicaId{0, 1}, {1, 1}, {2, 1}}) {
    ASSERT_OK_AND_ASSIGN(const Roster founded, Enter(self));
    EXPECT_EQ(founded.step, 0);
    EXPECT_EQ(founded.cause, Cause::kFounded);
  }
  ASSERT_OK_AND_ASSIGN(const Roster joined, Enter({1, 3}));
  EXPECT_EQ(joined.step, 5);
  EXPECT_EQ(joined.epoch, 2);
}

TEST(ReplayLogTest, AFounderBringsTheStateOfItsStep) {
  ASSERT_OK_AND_ASSIGN(const History history, History::Parse(kHistory));
  EXPECT_THAT(ReplayLog(history, {0, 1}, kSteps).Enter(/*first_step=*/4),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("4")));
  EXPECT_OK(ReplayLog(history, {1, 1}, kSteps).Enter(/*first_step=*/4));
}

TEST(ReplayLogTest, WhoIsThereLaterIsStartedAgain) {
  EXPECT_THAT(Enter({1, 2}),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("later lives")));
}

// Who was lost in the replay alone must not seem to have come to the end.
TEST(ReplayLogTest, ALifeAfterALossThatIsNotInTheHistoryIsRefused) {
  EXPECT_THAT(Enter({0, 2}), StatusIs(absl::StatusCode::kInvalidArgument,
                                      AllOf(HasSubstr("of replica 0.2"),
                                            HasSubstr("replica 0.1 took"))));
  EXPECT_THAT(Enter({1, 4}), StatusIs(absl::StatusCode::kInvalidArgument,
                                      HasSubstr("replica 1.3 took")));
  // Also where the history goes on to lose it, after the steps of this run.
  EXPECT_THAT(Enter({2, 2}, /*steps=*/8),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("replica 2.1 took")));
}

TEST(ReplayLogTest, ALifeAfterTheEndIsRefused) {
  for (const ReplicaId self : {ReplicaId{2, 2}, {3, 1}}) {
    EXPECT_THAT(Enter(self), StatusIs(absl::StatusCode::kInvalidArgument,
                                      AllOf(HasSubstr("before step 20"),
                                            Not(HasSubstr("took part")))));
  }
  // Its steps come later than this run's.
  EXPECT_THAT(
      Enter({1, 3}, /*steps=*/5),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("before step 5"), Not(HasSubstr("took part")))));
}

TEST(ReplayLogTest, AnEndThatTheHistoryHasIsTold) {
  ASSERT_OK_AND_ASSIGN(const History history, History::Parse(kHistory));
  const auto as_recorded = [&](const ReplicaId& self, int64_t first_step) {
    ReplayLog log(history, self, kSteps);
    EXPECT_FALSE(log.Enter(first_step).ok());
    return log.ends_as_recorded();
  };
  EXPECT_TRUE(as_recorded({1, 2}, 0));
  EXPECT_TRUE(as_recorded({2, 2}, 0));
  EXPECT_FALSE(as_recorded({0, 2}, 0));
  EXPECT_FALSE(as_recorded({0, 1}, 4));
}

TEST(ReplayLogTest, WhoIsLostIsToldSo) {
  ASSERT_OK_AND_ASSIGN(const History history, History::Parse(kHistory));
  ReplayLog lost(history, {2, 1}, kSteps);
  ReplayLog left(history, {0, 1}, kSteps);
  ASSERT_OK_AND_ASSIGN(Roster roster, left.Enter(/*first_step=*/0));
  while (roster.step < 8) {
    ASSERT_OK_AND_ASSIGN(roster, left.SkipLosses(roster));
    EXPECT_OK(lost.SkipLosses(roster));
    ASSERT_OK_AND_ASSIGN(roster, left.AwaitNext(roster, {}));
  }
  EXPECT_FALSE(lost.ends_as_recorded());
  EXPECT_THAT(lost.SkipLosses(roster),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("in step 8")));
  EXPECT_TRUE(lost.ends_as_recorded());
  ASSERT_OK_AND_ASSIGN(roster, left.SkipLosses(roster));
  EXPECT_EQ(Describe(roster).substr(Describe(roster).find("): ")),
            "): 0.1 1.3");
  while (roster.step < kSteps) {
    ASSERT_OK_AND_ASSIGN(roster, left.AwaitNext(roster, {}));
  }
  EXPECT_FALSE(left.ends_as_recorded());
}

}  // namespace
}  // namespace fsdp::replicas
