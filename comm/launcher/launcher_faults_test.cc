// A launcher among ignored signals, full disks, readers that do not read, and
// ranks that only pass on what they have heard; and jobs that are started again
// when a rank fails.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"
#include "comm/launcher/launch_options.h"
#include "comm/launcher/launcher.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/testing/launcher_processes.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::FileSizeLimit;
using ::testing::AllOf;
using ::testing::HasSubstr;

LaunchOptions Options(const std::string& role, int ranks = 2,
                      int max_restarts = 0) {
  LaunchOptions options;
  options.ranks = ranks;
  options.argv = {"launcher_faults_test"};
  options.environment = {{kRole, role}};
  options.grace_period = max_restarts > 0 ? absl::Milliseconds(10) : kLimit;
  options.terminate_period = kLimit;
  options.restarts.max_restarts = max_restarts;
  options.restarts.max_without_progress = 10;
  options.restarts.pause = absl::Milliseconds(1);
  return options;
}

// nohup ignores SIGHUP, and a shell lets background jobs ignore SIGINT. The
// signal after it shows that it did nothing.
TEST(LauncherIgnoredSignalsTest, StayIgnored) {
  for (const int ignored : {SIGHUP, SIGINT, SIGTERM}) {
    LauncherProcess launcher("train",
                             absl::StrCat(kIgnoredSignal, "=", ignored));
    ASSERT_TRUE(launcher.AwaitLines("ready", 2)) << launcher.output();
    const int next = ignored == SIGTERM ? SIGINT : SIGTERM;
    launcher.Signal(ignored);
    launcher.Signal(next);
    EXPECT_EQ(launcher.Wait(), 128 + next);
    for (const char* rank : {"[0]", "[1]"}) {
      EXPECT_THAT(launcher.output(),
                  HasSubstr(absl::StrCat(rank, " stopped by ", next)));
    }
  }
}

// Returns whether `pid` soon sleeps in poll() with no end. It does nothing else
// while it waits for one event.
bool WaitsWithoutEnd(pid_t pid) {
  const absl::Time deadline = absl::Now() + kLimit;
  while (absl::Now() < deadline) {
    std::ifstream file(absl::StrCat("/proc/", pid, "/syscall"));
    std::string number, fds, count, timeout;
    if (!(file >> number >> fds >> count >> timeout)) continue;
    // The call is poll(2), or ppoll(2) without a time.
    if (number == "7" && absl::EndsWith(timeout, "ffffffff")) return true;
    if (number == "271" && timeout == "0x0") return true;
  }
  return false;
}

// Returns whether `pid` soon has no children. One that has closed its files may
// take a while to end.
bool HasNoChildren(pid_t pid) {
  const absl::Time deadline = absl::Now() + kLimit;
  while (absl::Now() < deadline) {
    std::ifstream file(absl::StrCat("/proc/", pid, "/task/", pid, "/children"));
    std::string child;
    if (file.is_open() && !(file >> child)) return true;
  }
  return false;
}

TEST(LauncherOutputTest, AReaderThatDoesNotReadCostsNothingAndOneSignalEndsIt) {
  Fifo fifo;
  fifo.Watch();
  LauncherProcess launcher("print_much_and_fail",
                           absl::StrCat(kFifo, "=", fifo.path()));
  // All is printed: the launcher has to keep what the pipe does not take.
  ASSERT_TRUE(fifo.WriterIsGone());
  ASSERT_TRUE(HasNoChildren(launcher.pid()));
  EXPECT_TRUE(WaitsWithoutEnd(launcher.pid()));
  launcher.Signal(SIGTERM);
  EXPECT_EQ(launcher.WaitUnread(), 128 + SIGTERM);
}

TEST(LauncherOutputTest, ALimitOnTheSizeOfFilesIsAFailure) {
  const UniqueFd out(memfd_create("output", MFD_CLOEXEC));
  LaunchOptions options = Options("print_much");
  options.stdout_fd = out.get();
  // ThreadSanitizer writes half a mebibyte in each rank.
  const FileSizeLimit limit(1000000);
  ASSERT_OK_AND_ASSIGN(const LaunchReport report, LaunchRanks(options));
  EXPECT_EQ(report.output_errno, EFBIG);
  EXPECT_EQ(report.exit_code(), EXIT_FAILURE);
  EXPECT_EQ(ReadAll(out.get()).size(), 1000000);
}

TEST(LauncherCauseTest, ARankThatWasToldOfAFailureIsNotBlamed) {
  const Fifo fifo;
  LaunchOptions options = Options("rank_1_fails_after_its_echo");
  options.environment.emplace_back(kFifo, fifo.path());
  ASSERT_OK_AND_ASSIGN(const LaunchReport report, LaunchRanks(options));
  EXPECT_EQ(report.first_failed_rank, 1);
  EXPECT_EQ(report.exit_code(), 6);
  EXPECT_EQ(report.ToString(),
            "rank 1 exited with code 6; then rank 0 exited with code 113 "
            "(another rank had failed)");
}

TEST(LauncherCauseTest, WithoutACauseAnEchoIsAFailureAllTheSame) {
  ASSERT_OK_AND_ASSIGN(const LaunchReport report,
                       LaunchRanks(Options("both_are_told_of_a_failure")));
  EXPECT_GE(report.first_failed_rank, 0);
  EXPECT_EQ(report.exit_code(), kPeerFailedExitCode);
}

struct Launched {
  LaunchReport report;
  std::string output;
};

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
  LauncherProcess launcher(
      "hold_fifo", absl::StrCat(kFifo, "=/dev/null ", kMaxRestarts, "=5"));
  ASSERT_TRUE(launcher.AwaitLines("ready", 2)) << launcher.output();
  launcher.Signal(SIGTERM);
  EXPECT_EQ(launcher.Wait(), 128 + SIGTERM);
  EXPECT_THAT(launcher.output(), ::testing::Not(HasSubstr("restart 1")));
}

TEST(LauncherRestartsTest, ASignalEndsThePause) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    LauncherProcess launcher("rank_1_exits_with_3",
                             absl::StrCat(kMaxRestarts, "=5"));
    ASSERT_TRUE(launcher.AwaitLines("restart 1 of 5, with 2 ranks, in 1h", 1))
        << launcher.output();
    launcher.Signal(signal);
    EXPECT_EQ(launcher.Wait(), 128 + signal);
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
