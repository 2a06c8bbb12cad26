#include <signal.h>

#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "comm/launcher/launch_options.h"
#include "comm/launcher/launcher_supervisor.h"
#include "comm/launcher/processes/process_end.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::testing::HasSubstr;

RankEnd Exited(int code) { return {ProcessEnd{code, 0}, false}; }
RankEnd Killed(int signal) { return {ProcessEnd{0, signal}, false}; }
RankEnd Ended(int signal) { return {ProcessEnd{0, signal}, true}; }

// An attempt of three ranks of which rank 1 has failed.
LaunchAttempt Failed(absl::Duration lasted = absl::Seconds(5)) {
  return {{Exited(113), Exited(1), Ended(SIGTERM)}, 1, lasted};
}

RestartOptions Options(int max_restarts) {
  RestartOptions options;
  options.max_restarts = max_restarts;
  return options;
}

TEST(RanksLeftTest, AreThoseThatDidNotFailByThemselves) {
  const struct {
    std::vector<RankEnd> ranks;
    int first_failed;
    int left;
  } cases[] = {
      {{Exited(113), Exited(1), Ended(SIGTERM)}, 1, 2},
      {{Killed(SIGKILL), Killed(SIGKILL), Exited(1), Exited(0)}, 0, 2},
      {{Exited(3), Killed(SIGSEGV), Exited(1), Exited(1)}, 0, 2},
      // A rank may end itself when it hears of the failure.
      {{Killed(SIGKILL), Killed(SIGABRT)}, 0, 1},
      {{Exited(1), Killed(SIGABRT)}, 1, 1},
      {{Killed(SIGKILL)}, 0, 0},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(RanksLeft({c.ranks, c.first_failed, absl::ZeroDuration()}),
              c.left);
  }
}

TEST(RestartPolicyTest, ByDefaultThereIsNoRestart) {
  const RestartOptions options;
  RestartPolicy policy(options);
  const RestartPolicy::Decision decision = policy.Decide(Failed());
  EXPECT_EQ(decision.ranks, 0);
  EXPECT_EQ(decision.why_none, "");
}

TEST(RestartPolicyTest, RestartsAllRanksSoOften) {
  const RestartOptions options = Options(2);
  RestartPolicy policy(options);
  EXPECT_EQ(policy.Decide(Failed()).ranks, 3);
  EXPECT_EQ(policy.restarts(), 1);
  EXPECT_EQ(policy.Decide(Failed()).ranks, 3);
  EXPECT_EQ(policy.restarts(), 2);
  const RestartPolicy::Decision last = policy.Decide(Failed());
  EXPECT_EQ(last.ranks, 0);
  EXPECT_EQ(last.why_none, "it was restarted 2 times, as often as it may be");
  EXPECT_EQ(policy.restarts(), 2);
}

TEST(RestartPolicyTest, WhoWasToldToStopIsNotStartedAgain) {
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) {
    const RestartOptions options = Options(5);
    RestartPolicy policy(options);
    const RestartPolicy::Decision decision = policy.Decide(
        {{Exited(128 + signal), Exited(128 + signal)}, 1, absl::Hours(1)});
    EXPECT_EQ(decision.ranks, 0);
    EXPECT_THAT(decision.why_none, HasSubstr("told to stop"));
  }
}

TEST(RestartPolicyTest, WhatWouldFailAgainIsNotRestarted) {
  const RestartOptions options = Options(5);
  RestartPolicy policy(options);
  const RestartPolicy::Decision decision = policy.Decide(
      {{Exited(113), Exited(kUsageErrorExitCode)}, 1, absl::Hours(1)});
  EXPECT_EQ(decision.ranks, 0);
  EXPECT_EQ(decision.why_none, "exit code 2 says that it would fail again");
  EXPECT_EQ(policy.restarts(), 0);
  // The code of another rank does not count, nor does a signal of that number.
  EXPECT_EQ(policy
                .Decide({{Killed(SIGINT), Exited(kUsageErrorExitCode)},
                         0,
                         absl::Hours(1)})
                .ranks,
            2);
}

TEST(RestartPolicyTest, MayLeaveRanksAwayDownToALeastNumber) {
  RestartOptions options = Options(5);
  options.on_restart = RanksLeft;
  options.min_ranks = 2;
  RestartPolicy policy(options);
  EXPECT_EQ(policy.Decide(Failed()).ranks, 2);
  const RestartPolicy::Decision decision =
      policy.Decide({{Exited(1), Ended(SIGTERM)}, 0, absl::Hours(1)});
  EXPECT_EQ(decision.ranks, 0);
  EXPECT_EQ(decision.why_none, "1 rank would be left, and it needs at least 2");
}

TEST(RestartPolicyTest, NoJobGoesOnWithoutRanks) {
  RestartOptions options = Options(5);
  options.on_restart = [](const LaunchAttempt&) { return -1; };
  options.min_ranks = 0;
  RestartPolicy policy(options);
  EXPECT_EQ(policy.Decide(Failed()).why_none,
            "0 ranks would be left, and it needs at least 1");
}

TEST(RestartPolicyTest, EndsWhatFailsAtOnceAgainAndAgain) {
  RestartOptions options = Options(100);
  options.max_without_progress = 3;
  RestartPolicy policy(options);
  EXPECT_EQ(policy.Decide(Failed()).ranks, 3);
  EXPECT_EQ(policy.Decide(Failed(absl::Seconds(59))).ranks, 3);
  // This attempt has got on.
  EXPECT_EQ(policy.Decide(Failed(absl::Seconds(60))).ranks, 3);
  EXPECT_EQ(policy.Decide(Failed()).ranks, 3);
  EXPECT_EQ(policy.Decide(Failed()).ranks, 3);
  const RestartPolicy::Decision last = policy.Decide(Failed());
  EXPECT_EQ(last.ranks, 0);
  EXPECT_THAT(last.why_none, HasSubstr("3 attempts in a row have not got on"));
  EXPECT_THAT(last.why_none, HasSubstr("failed in a minute"));
}

TEST(RestartPolicyTest, WhoeverCanTellDecidesWhetherItGetsOn) {
  int64_t step = 10;  // of a checkpoint of before
  RestartOptions options = Options(100);
  options.max_without_progress = 2;
  options.progress = [&step] { return step; };
  RestartPolicy policy(options);
  EXPECT_EQ(policy.Decide(Failed(absl::Hours(1))).ranks, 3);
  step = 20;
  EXPECT_EQ(policy.Decide(Failed(absl::ZeroDuration())).ranks, 3);
  EXPECT_EQ(policy.Decide(Failed(absl::Hours(1))).ranks, 3);
  const RestartPolicy::Decision last = policy.Decide(Failed(absl::Hours(1)));
  EXPECT_EQ(last.ranks, 0);
  EXPECT_THAT(last.why_none, HasSubstr("nothing new was saved"));
}

TEST(RestartPolicyTest, WaitsTwiceAsLongForWhatDoesNotGetOn) {
  RestartOptions options = Options(100);
  options.max_without_progress = 100;
  options.pause = absl::Seconds(1);
  options.longest_pause = absl::Seconds(5);
  RestartPolicy policy(options);
  for (const int seconds : {1, 2, 4, 5, 5}) {
    EXPECT_EQ(policy.Decide(Failed()).pause, absl::Seconds(seconds));
  }
  EXPECT_EQ(policy.Decide(Failed(absl::Hours(1))).pause, absl::Seconds(1));
  EXPECT_EQ(policy.Decide(Failed()).pause, absl::Seconds(1));
  EXPECT_EQ(policy.Decide(Failed()).pause, absl::Seconds(2));
}

}  // namespace
}  // namespace fsdp::comm
