// What is made of ends of ranks; launcher_test has real ones.
#include "comm/launcher/launch_options.h"

#include "comm/launcher/restart_policy.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

RankEnd Exited(int code) { return {ProcessEnd{code, 0}, false}; }
RankEnd Told(RankEnd end) {
  end.was_told = true;
  return end;
}
RankEnd Killed(int signal) { return {ProcessEnd{0, signal}, false}; }
RankEnd Ended(int signal) { return {ProcessEnd{0, signal}, true}; }

struct Case {
  std::vector<RankEnd> ranks;
  int exit_code;
  std::string text;
  int first_failed = -1;
  int interrupt_signal = 0;
  int output_errno = 0;
};

const Case kCases[] = {
    {{Exited(0), Exited(0)}, 0, "ranks 0, 1 exited with code 0"},
    {{Exited(0), Killed(SIGKILL), Exited(113)},
     128 + SIGKILL,
     "rank 1 was killed by signal 9 (SIGKILL); then rank 0 exited with code "
     "0, rank 2 exited with code 113 (another rank had failed)",
     1},
    {{Exited(0), Killed(SIGINT)},
     128 + SIGINT,
     "interrupted by signal 2 (SIGINT); then rank 0 exited with code 0, rank "
     "1 was killed by signal 2 (SIGINT)",
     -1,
     SIGINT},
    // The ranks had finished before they learned of the signal.
    {{Exited(0), Exited(0)},
     0,
     "interrupted by signal 15 (SIGTERM); then ranks 0, 1 exited with code 0",
     -1,
     SIGTERM},
    {{Told(Exited(128 + SIGTERM)), Told(Exited(113)), Told(Exited(1))},
     1,
     "interrupted by signal 15 (SIGTERM); then rank 2 exited with code 1, rank "
     "1 exited with code 113 (another rank had failed), rank 0 exited with "
     "code 143 (told to stop by signal 15 (SIGTERM))",
     -1,
     SIGTERM},
    {{Told(Ended(SIGTERM)), Told(Killed(SIGSEGV))},
     128 + SIGSEGV,
     "interrupted by signal 15 (SIGTERM); then rank 0 was ended by the "
     "launcher with signal 15 (SIGTERM), rank 1 was killed by signal 11 "
     "(SIGSEGV)",
     -1,
     SIGTERM},
    // The launcher's signal decides its exit code, whoever has failed before.
    {{Exited(3)},
     128 + SIGTERM,
     "interrupted by signal 15 (SIGTERM); rank 0 exited with code 3",
     0,
     SIGTERM},
    {{Exited(0)},
     1,
     "rank 0 exited with code 0; what they printed could not be written: No "
     "space left on device",
     -1,
     0,
     ENOSPC},
    {{Exited(3)},
     3,
     "rank 0 exited with code 3; what they printed could not be written: "
     "File too large",
     0,
     0,
     EFBIG},
};

TEST(LaunchReportTest, SaysWhatHasHappenedAndGivesItsExitCode) {
  for (const Case& c : kCases) {
    LaunchReport report;
    report.ranks = c.ranks;
    report.first_failed_rank = c.first_failed;
    report.interrupt_signal = c.interrupt_signal;
    report.output_errno = c.output_errno;
    EXPECT_EQ(report.ToString(), c.text);
    EXPECT_EQ(report.exit_code(), c.exit_code) << c.text;
  }
}

TEST(LaunchReportTest, NamesEveryAttempt) {
  LaunchReport report;
  report.failed_attempts = {
      {{Exited(113), Killed(SIGKILL)}, 1, absl::Milliseconds(61700)},
      {{Exited(3)}, 0, absl::Milliseconds(20)}};
  report.ranks = {Ended(SIGINT)};
  report.interrupt_signal = SIGINT;
  report.lasted = absl::Seconds(2);
  report.gave_up = "it is late";
  EXPECT_EQ(report.ToString(),
            "attempt 1 (2 ranks, 1m1s): rank 1 was killed by signal 9 "
            "(SIGKILL); then rank 0 exited with code 113 (another rank had "
            "failed)\n"
            "attempt 2 (1 rank, 0): rank 0 exited with code 3\n"
            "attempt 3 (1 rank, 2s): interrupted by signal 2 (SIGINT); then "
            "rank 0 was ended by the launcher with signal 2 (SIGINT)\n"
            "not restarted: it is late");
  EXPECT_EQ(report.exit_code(), 128 + SIGINT);
}

TEST(LaunchReportTest, ExitCodesOfRanks) {
  EXPECT_EQ(ExitCodeOf(absl::OkStatus()), 0);
  EXPECT_EQ(ExitCodeOf(absl::InvalidArgumentError("--steps=0")), 2);
  EXPECT_EQ(ExitCodeOf(absl::AbortedError("rank 1 has failed")),
            kPeerFailedExitCode);
  EXPECT_EQ(ExitCodeOf(absl::InternalError("mine")), 1);
  EXPECT_EQ(ExitCodeOf(absl::CancelledError("mine")), 1);
  EXPECT_EQ(ExitCodeOf(StoppedError(SIGUSR1, "after step 7")), 128 + SIGUSR1);
}

// An attempt of three ranks of which rank 1 has failed.
LaunchAttempt Failed(absl::Duration lasted = absl::Seconds(5)) {
  return {{Exited(113), Exited(1), Ended(SIGTERM)}, 1, lasted};
}

// Returns why the policy does not restart what ended so, or "".
std::string WhyNone(RestartPolicy& policy,
                    const LaunchAttempt& attempt = Failed()) {
  const RestartPolicy::Decision decision = policy.Decide(attempt);
  return decision.ranks == 0 ? decision.why_none : "";
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

TEST(RestartPolicyTest, RestartsAllRanksSoOften) {
  const RestartOptions options = Options(2);
  RestartPolicy policy(options);
  EXPECT_EQ(policy.Decide(Failed()).ranks, 3);
  EXPECT_EQ(policy.restarts(), 1);
  EXPECT_EQ(policy.Decide(Failed()).ranks, 3);
  EXPECT_EQ(policy.restarts(), 2);
  EXPECT_EQ(WhyNone(policy), "it was restarted 2 times, as often as it may be");
  EXPECT_EQ(policy.restarts(), 2);
}

TEST(RestartPolicyTest, WhoWasToldToStopIsNotStartedAgain) {
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) {
    const RestartOptions options = Options(5);
    RestartPolicy policy(options);
    const RankEnd told = Exited(128 + signal);
    EXPECT_THAT(WhyNone(policy, {{told, told}, 1, absl::Hours(1)}),
                HasSubstr("told to stop"));
  }
}

TEST(RestartPolicyTest, WhatWouldFailAgainIsNotRestarted) {
  const RestartOptions options = Options(5);
  RestartPolicy policy(options);
  const RankEnd usage = Exited(kUsageErrorExitCode);
  EXPECT_EQ(WhyNone(policy, {{Exited(113), usage}, 1, absl::Hours(1)}),
            "exit code 2 says that it would fail again");
  EXPECT_EQ(policy.restarts(), 0);
  // The code of another rank does not count, nor does a signal of that number.
  EXPECT_EQ(policy.Decide({{Killed(SIGINT), usage}, 0, absl::Hours(1)}).ranks,
            2);
}

TEST(RestartPolicyTest, MayLeaveRanksAwayDownToALeastNumber) {
  RestartOptions options = Options(5);
  options.on_restart = RanksLeft;
  options.min_ranks = 2;
  RestartPolicy policy(options);
  EXPECT_EQ(policy.Decide(Failed()).ranks, 2);
  EXPECT_EQ(WhyNone(policy, {{Exited(1), Ended(SIGTERM)}, 0, absl::Hours(1)}),
            "1 rank would be left, and it needs at least 2");
  options.on_restart = [](const LaunchAttempt&) { return -1; };
  options.min_ranks = 0;
  RestartPolicy none(options);
  EXPECT_EQ(WhyNone(none), "0 ranks would be left, and it needs at least 1");
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
  EXPECT_THAT(WhyNone(policy),
              AllOf(HasSubstr("3 attempts in a row have not got on"),
                    HasSubstr("failed in a minute")));
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
  EXPECT_THAT(WhyNone(policy, Failed(absl::Hours(1))),
              HasSubstr("nothing new was saved"));
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

TEST(StopRequestDeathTest, TheSecondSignalEndsTheProcess) {
  for (const int second : {SIGINT, SIGTERM}) {
    EXPECT_EXIT(
        {
          const StopRequest stop(absl::Minutes(2),
                                 /*apart=*/absl::ZeroDuration());
          raise(SIGINT);
          raise(second);
        },
        ::testing::KilledBySignal(second), "");
  }
}

// A terminal's or scheduler's signal comes to a rank directly and by way of its
// launcher.
TEST(StopRequestTest, TheSameSignalTwiceAtOnceIsOne) {
  const StopRequest stop(absl::Minutes(2), /*apart=*/absl::Hours(1));
  raise(SIGTERM);
  raise(SIGTERM);
  raise(SIGINT);
  EXPECT_EQ(stop.signal(), SIGTERM);
}

// Schedulers send SIGUSR1 some time before the SIGTERM that ends the job.
TEST(StopRequestTest, SigtermMayFollowSigusr1) {
  const StopRequest stop(absl::Minutes(2), /*apart=*/absl::ZeroDuration());
  raise(SIGUSR1);
  raise(SIGUSR1);
  raise(SIGTERM);
  EXPECT_EQ(stop.signal(), SIGUSR1);
}

TEST(StopRequestTest, RestoresWhatWas) {
  signal(SIGTERM, SIG_IGN);
  signal(SIGUSR1, SIG_IGN);
  {
    const StopRequest stop;
    raise(SIGTERM);
    EXPECT_FALSE(stop.requested());
    raise(SIGUSR1);
    EXPECT_EQ(stop.signal(), SIGUSR1);
  }
  EXPECT_EQ(signal(SIGTERM, SIG_DFL), SIG_IGN);
  EXPECT_EQ(signal(SIGUSR1, SIG_DFL), SIG_IGN);
  EXPECT_EQ(signal(SIGINT, SIG_DFL), SIG_DFL);
}

int asked = 0;

TEST(IgnoreQuestionsTest, QuestionsDoNotEndTheProcessAndHandlersStay) {
  IgnoreQuestions();
  raise(SIGQUIT);
  raise(SIGUSR1);
  signal(SIGQUIT, [](int /*signal*/) { ++asked; });
  struct sigaction action = {};
  action.sa_flags = SA_SIGINFO;
  action.sa_sigaction = [](int, siginfo_t*, void*) { ++asked; };
  sigaction(SIGUSR1, &action, nullptr);
  IgnoreQuestions();
  raise(SIGQUIT);
  raise(SIGUSR1);
  EXPECT_EQ(asked, 2);
  signal(SIGQUIT, SIG_DFL);
  signal(SIGUSR1, SIG_DFL);
}

}  // namespace
}  // namespace fsdp::comm
