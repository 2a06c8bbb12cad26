// A launcher among ignored signals, full disks, readers that do not read, and
// ranks that only pass on what they have heard.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"
#include "comm/launcher/launcher.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/testing/launcher_processes.h"
#include "comm/testing/launcher_roles.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::FileSizeLimit;
using ::testing::AllOf;
using ::testing::HasSubstr;

LaunchOptions Options(const std::string& role) {
  LaunchOptions options;
  options.ranks = 2;
  options.argv = {"launcher_faults_test"};
  options.environment = {{kRole, role}};
  options.grace_period = kLimit;
  options.terminate_period = kLimit;
  return options;
}

UniqueFd Sink() { return UniqueFd(memfd_create("sink", MFD_CLOEXEC)); }

// nohup ignores SIGHUP, and a shell lets background jobs ignore SIGINT. The
// signal after it shows that it did nothing.
TEST(LauncherIgnoredSignalsTest, StayIgnored) {
  for (const int ignored : {SIGHUP, SIGINT, SIGTERM}) {
    LauncherProcess launcher("train", /*fifo=*/"", ignored);
    ASSERT_TRUE(launcher.WaitForLines("ready", 2)) << launcher.output();
    const int next = ignored == SIGTERM ? SIGINT : SIGTERM;
    launcher.process().Signal(ignored);
    launcher.process().Signal(next);
    const std::optional<ProcessEnd> end = launcher.WaitForEnd();
    ASSERT_TRUE(end.has_value());
    EXPECT_EQ(end->exit_code, 128 + next);
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
  LauncherProcess launcher("print_much_and_fail", fifo.path());
  // All is printed: the launcher has to keep what the pipe does not take.
  ASSERT_TRUE(fifo.WriterIsGone());
  ASSERT_TRUE(HasNoChildren(launcher.process().pid()));
  EXPECT_TRUE(WaitsWithoutEnd(launcher.process().pid()));
  launcher.process().Signal(SIGTERM);
  const std::optional<ProcessEnd> end = launcher.WaitForEndUnread();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->exit_code, 128 + SIGTERM);
}

TEST(LauncherOutputTest, AFullDiskIsAFailureAndTheOtherStreamComesOut) {
  const UniqueFd full(open("/dev/full", O_WRONLY | O_CLOEXEC));
  const UniqueFd err = Sink();
  LaunchOptions options = Options("print");
  options.stdout_fd = full.get();
  options.stderr_fd = err.get();
  ASSERT_OK_AND_ASSIGN(const LaunchReport report, LaunchRanks(options));
  EXPECT_EQ(report.first_failed_rank, -1);
  EXPECT_EQ(report.output_errno, ENOSPC);
  EXPECT_EQ(report.exit_code(), EXIT_FAILURE);
  EXPECT_THAT(report.ToString(),
              AllOf(HasSubstr("ranks 0, 1 exited with code 0"),
                    HasSubstr("could not be written: No space left")));
  const std::string text = ReadAll(err.get());
  EXPECT_THAT(text, AllOf(HasSubstr("[0] local rank 0"),
                          HasSubstr("[1] local rank 1")));
}

TEST(LauncherOutputTest, ALimitOnTheSizeOfFilesIsAFailure) {
  const UniqueFd out = Sink();
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

}  // namespace
}  // namespace fsdp::comm
