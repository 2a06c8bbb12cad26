// Jobs that are started again when a rank fails: this program as launcher and
// as ranks.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "comm/launcher/launch_options.h"
#include "comm/launcher/launcher.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/testing/launcher_processes.h"
#include "comm/testing/launcher_roles.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Launched {
  LaunchReport report;
  std::string output;
};

LaunchOptions Options(const std::string& role, int ranks, int max_restarts) {
  LaunchOptions options;
  options.ranks = ranks;
  options.argv = {"launcher_restarts_test"};
  options.environment = {{kRole, role}};
  options.grace_period = absl::Milliseconds(10);
  options.terminate_period = kLimit;
  options.restarts.max_restarts = max_restarts;
  options.restarts.max_without_progress = 10;
  options.restarts.pause = absl::Milliseconds(1);
  return options;
}

absl::StatusOr<Launched> Launch(LaunchOptions options) {
  const UniqueFd output(memfd_create("output", MFD_CLOEXEC));
  options.stdout_fd = options.stderr_fd = output.get();
  FSDP_ASSIGN_OR_RETURN(LaunchReport report, LaunchRanks(options));
  EXPECT_TRUE(waitpid(-1, nullptr, WNOHANG) < 0 && errno == ECHILD);
  return Launched{std::move(report), ReadAll(output.get())};
}

TEST(LauncherRestartsTest, AJobGoesOnWithAsManyRanks) {
  ASSERT_OK_AND_ASSIGN(const Launched launched,
                       Launch(Options("fail_twice", 2, 5)));
  EXPECT_EQ(launched.report.exit_code(), 0);
  EXPECT_EQ(launched.report.failed_attempts.size(), 2);
  EXPECT_THAT(
      launched.report.ToString(),
      ::testing::MatchesRegex(
          "attempt 1 \\(2 ranks, [0-9]+s?\\): rank 1 exited with code 3; then "
          "rank 0 was ended by the launcher with signal 15 \\(SIGTERM\\)\n"
          "attempt 2 \\(2 ranks, [0-9]+s?\\): rank 1 exited with code 3; then "
          "rank 0 was ended by the launcher with signal 15 \\(SIGTERM\\)\n"
          "attempt 3 \\(2 ranks, [0-9]+s?\\): ranks 0, 1 exited with code 0"));
  EXPECT_THAT(
      launched.output,
      AllOf(HasSubstr("[1] rank 1 of 2, restart 0 of 5\nrank 1 exited with "
                      "code 3; then rank 0 was ended"),
            HasSubstr("\nrestart 1 of 5, with 2 ranks, in 1ms\n"),
            HasSubstr("[1] rank 1 of 2, restart 1 of 5\n"),
            HasSubstr("\nrestart 2 of 5, with 2 ranks, in 2ms\n"),
            HasSubstr("[1] rank 1 of 2, restart 2 of 5\n"),
            HasSubstr("[0] rank 0 of 2, restart 2 of 5\n")));
}

TEST(LauncherRestartsTest, OrWithThoseThatAreLeft) {
  LaunchOptions options = Options("fail_twice", 3, 5);
  options.restarts.on_restart = RanksLeft;
  ASSERT_OK_AND_ASSIGN(const Launched launched, Launch(options));
  EXPECT_EQ(launched.report.exit_code(), 0);
  EXPECT_EQ(launched.report.ranks.size(), 1);
  EXPECT_THAT(launched.output,
              AllOf(HasSubstr("[1] rank 1 of 3, restart 0 of 5\n"),
                    HasSubstr("[1] rank 1 of 2, restart 1 of 5\n"),
                    HasSubstr("\nrestart 2 of 5, with 1 rank, in"),
                    HasSubstr("[0] rank 0 of 1, restart 2 of 5\n")));
}

TEST(LauncherRestartsTest, TheLastFailureIsTheAnswer) {
  ASSERT_OK_AND_ASSIGN(const Launched launched,
                       Launch(Options("rank_1_is_killed_at_once", 2, 1)));
  EXPECT_EQ(launched.report.exit_code(), 128 + SIGKILL);
  EXPECT_EQ(launched.report.failed_attempts.size(), 1);
  EXPECT_THAT(launched.report.ToString(),
              AllOf(HasSubstr("attempt 2 (2 ranks, "),
                    HasSubstr("\nnot restarted: it was restarted 1 time, as "
                              "often as it may be")));
}

TEST(LauncherRestartsTest, EachAttemptHasAPort) {
  ASSERT_OK_AND_ASSIGN(const Launched launched,
                       Launch(Options("use_the_port_after_a_failure", 2, 1)));
  EXPECT_EQ(launched.report.exit_code(), 0) << launched.report.ToString();
  EXPECT_EQ(launched.report.failed_attempts.size(), 1);
}

TEST(LauncherRestartsTest, NothingOfAnAttemptIsLeftForTheNext) {
  Fifo fifo;
  fifo.Watch();
  LaunchOptions options = Options("leave_grandchild_and_fail", 1, 1);
  options.environment.emplace_back(kFifo, fifo.path());
  ASSERT_OK_AND_ASSIGN(const Launched launched, Launch(options));
  EXPECT_EQ(launched.report.exit_code(), 0) << launched.report.ToString();
  EXPECT_EQ(launched.report.failed_attempts.size(), 1);
}

TEST(LauncherRestartsTest, AJobThatIsToldToEndIsNotRestarted) {
  LauncherProcess launcher("hold_fifo", "/dev/null", 0, /*max_restarts=*/5);
  ASSERT_TRUE(launcher.WaitForLines("ready", 2)) << launcher.output();
  launcher.process().Signal(SIGTERM);
  const std::optional<ProcessEnd> end = launcher.WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->exit_code, 128 + SIGTERM);
  EXPECT_THAT(launcher.output(), ::testing::Not(HasSubstr("restart 1")));
}

TEST(LauncherRestartsTest, ASignalEndsThePause) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    LauncherProcess launcher("rank_1_exits_with_3", "", 0, /*max_restarts=*/5);
    ASSERT_TRUE(launcher.WaitForLines("restart 1 of 5, with 2 ranks, in 1h", 1))
        << launcher.output();
    launcher.process().Signal(signal);
    const std::optional<ProcessEnd> end = launcher.WaitForEnd();
    ASSERT_TRUE(end.has_value());
    EXPECT_EQ(end->exit_code, 128 + signal);
  }
}

// Nobody is there to answer such signals before the ranks start and after they
// have ended.
TEST(LauncherRestartsTest, SignalsThatInspectEndNoLauncher) {
  LaunchOptions options = Options("rank_1_is_asked_too_much", 2, 1);
  options.restarts.progress = [] {
    raise(SIGQUIT);
    raise(SIGUSR1);
    return 0;
  };
  ASSERT_OK_AND_ASSIGN(const Launched launched, Launch(options));
  EXPECT_EQ(launched.report.exit_code(), kUsageErrorExitCode);
}

}  // namespace
}  // namespace fsdp::comm
