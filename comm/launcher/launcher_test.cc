// Runs this program as launcher and as ranks, also among ignored signals, full
// disks, readers that do not read, and ranks that only pass on what they have
// heard; and jobs that are started again when a rank fails.

#include "comm/launcher/launcher.h"

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/testing/launcher_processes.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::ResourceLimit;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Returns the lines, sorted: ranks print at the same time.
std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines =
      absl::StrSplit(text, '\n', absl::SkipEmpty());
  std::sort(lines.begin(), lines.end());
  return lines;
}

struct Launched {
  LaunchReport report;
  std::string out;
  std::string err;
};

LaunchOptions Options(const std::string& role, int ranks,
                      int max_restarts = 0) {
  LaunchOptions options;
  options.ranks = ranks;
  options.argv = {"launcher_test"};
  options.environment = {{kRole, role}};
  options.grace_period = absl::Milliseconds(max_restarts > 0 ? 10 : 100);
  // This time belongs to ranks that are told to end, not to those of a job that
  // has failed.
  options.stop_period = absl::Hours(1);
  options.terminate_period = kLimit;
  options.restarts.max_restarts = max_restarts;
  options.restarts.max_without_progress = 10;
  options.restarts.pause = absl::Milliseconds(1);
  return options;
}

absl::StatusOr<Launched> Launch(LaunchOptions options) {
  const UniqueFd out(memfd_create("out", MFD_CLOEXEC));
  const UniqueFd err(memfd_create("err", MFD_CLOEXEC));
  options.stdout_fd = out.get();
  // What is said of restarts comes among what ranks print.
  options.stderr_fd = options.restarts.max_restarts > 0 ? out.get() : err.get();
  FSDP_ASSIGN_OR_RETURN(LaunchReport report, LaunchRanks(options));
  // Nothing is left: no zombie, no child.
  FSDP_CHECK(waitpid(-1, nullptr, WNOHANG) < 0 && errno == ECHILD);
  return Launched{std::move(report), ReadAll(out.get()), ReadAll(err.get())};
}

absl::StatusOr<Launched> Launch(const std::string& role, int ranks) {
  return Launch(Options(role, ranks));
}

absl::StatusOr<Launched> LaunchWith(const Fifo& fifo, LaunchOptions options) {
  options.environment.emplace_back(kFifo, fifo.path());
  return Launch(std::move(options));
}

TEST(LauncherTest, RanksKnowWhoTheyAreAndTheirLinesHavePrefixes) {
  ASSERT_OK_AND_ASSIGN(const Launched launched, Launch("print", 3));
  EXPECT_EQ(launched.report.exit_code(), 0);
  EXPECT_EQ(launched.report.first_failed_rank, -1);
  EXPECT_EQ(launched.report.ToString(), "ranks 0, 1, 2 exited with code 0");
  EXPECT_THAT(
      Lines(launched.out),
      ElementsAre("[0] rank 0 of 3", "[1] rank 1 of 3", "[2] rank 2 of 3"));
  EXPECT_THAT(Lines(launched.err),
              ElementsAre("[0] local rank 0 from --ranks",
                          "[1] local rank 1 from --ranks",
                          "[2] local rank 2 from --ranks"));
}

TEST(LauncherTest, EachJobHasASecretOfItsOwn) {
  std::set<std::string> secrets;
  for (int job = 0; job < 2; ++job) {
    ASSERT_OK_AND_ASSIGN(const Launched launched, Launch("print_secret", 2));
    const std::vector<std::string> lines = Lines(launched.out);
    ASSERT_EQ(lines.size(), 2);
    const std::string secret = lines[0].substr(4);
    EXPECT_EQ(lines,
              (std::vector<std::string>{"[0] " + secret, "[1] " + secret}));
    EXPECT_EQ(secret.size(), 64);
    secrets.insert(secret);
  }
  EXPECT_EQ(secrets.size(), 2);
}

TEST(LauncherTest, ASecretThatIsThereStays) {
  ASSERT_EQ(setenv("FSDP_JOB_SECRET", "ours", /*overwrite=*/1), 0);
  const absl::StatusOr<Launched> launched = Launch("print_secret", 1);
  unsetenv("FSDP_JOB_SECRET");
  ASSERT_OK(launched);
  EXPECT_EQ(launched->out, "[0] ours\n");
}

TEST(LauncherTest, AFailingRankEndsTheOthers) {
  ASSERT_OK_AND_ASSIGN(const Launched launched,
                       Launch("rank_1_exits_with_3", 3));
  EXPECT_EQ(launched.report.exit_code(), 3);
  EXPECT_EQ(launched.report.first_failed_rank, 1);
  EXPECT_EQ(launched.report.ToString(),
            "rank 1 exited with code 3; then ranks 0, 2 were ended by the "
            "launcher with signal 15 (SIGTERM)");
}

TEST(LauncherTest, SurvivorsMaySayWhatTheyMiss) {
  const Fifo fifo;
  LaunchOptions options = Options("rank_1_is_killed", 2);
  options.grace_period = absl::Seconds(60);
  ASSERT_OK_AND_ASSIGN(const Launched launched, LaunchWith(fifo, options));
  EXPECT_EQ(launched.report.exit_code(), 128 + SIGKILL);
  EXPECT_EQ(launched.out, "[0] rank 1 is gone\n");
  EXPECT_EQ(launched.report.ToString(),
            "rank 1 was killed by signal 9 (SIGKILL); then rank 0 exited with "
            "code 1");
}

TEST(LauncherTest, RanksThatAreStoppedOrIgnoreSigtermEnd) {
  for (const auto& [role, code] :
       {std::pair("rank_1_is_stopped", 4), {"rank_1_ignores_sigterm", 5}}) {
    const Fifo fifo;
    LaunchOptions options = Options(role, 2);
    options.terminate_period = absl::Milliseconds(100);
    ASSERT_OK_AND_ASSIGN(const Launched launched, LaunchWith(fifo, options));
    EXPECT_EQ(launched.report.exit_code(), code);
    EXPECT_TRUE(launched.report.ranks[1].forced);
    EXPECT_EQ(launched.report.ranks[1].end.signal, SIGKILL);
  }
}

TEST(LauncherTest, MuchOutputComesOutWhole) {
  ASSERT_OK_AND_ASSIGN(const Launched launched, Launch("print_much", 2));
  EXPECT_EQ(launched.out.size(), 2 * kLines * (kLineBytes + 4));
  const std::vector<std::string> lines = Lines(launched.out);
  ASSERT_EQ(lines.size(), 2000);
  EXPECT_EQ(lines.front(), absl::StrCat("[0] ", std::string(999, 'a')));
  EXPECT_EQ(lines.front(), lines[999]);
  EXPECT_EQ(lines[1000], absl::StrCat("[1] ", std::string(999, 'b')));
  EXPECT_EQ(lines[1000], lines.back());
}

TEST(LauncherTest, RanksDieWithTheLauncher) {
  Fifo fifo;
  fifo.Watch();
  LauncherProcess launcher("hold_fifo", absl::StrCat(kFifo, "=", fifo.path()));
  ASSERT_TRUE(launcher.AwaitLines("ready", 2)) << launcher.output();
  // This kills only the launcher: its ranks lead groups of their own.
  launcher.Signal(SIGKILL);
  EXPECT_TRUE(fifo.WriterIsGone());
}

TEST(LauncherTest, PassesInterruptsOn) {
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) {
    LauncherProcess launcher("train");
    ASSERT_TRUE(launcher.AwaitLines("ready", 2)) << launcher.output();
    launcher.Signal(signal);
    EXPECT_EQ(launcher.Wait(), 128 + signal);
    const std::string line = absl::StrCat("stopped by ", signal);
    EXPECT_THAT(launcher.output(), HasSubstr(absl::StrCat("[0] ", line)));
    EXPECT_THAT(launcher.output(), HasSubstr(absl::StrCat("[1] ", line)));
  }
}

// Returns whether a child of this process stops soon.
bool AChildStops() {
  const absl::Time deadline = absl::Now() + kLimit;
  siginfo_t info = {};
  while (info.si_pid == 0 && absl::Now() < deadline) {
    waitid(P_ALL, 0, &info, WSTOPPED | WNOHANG);
    poll(nullptr, 0, 1);
  }
  return info.si_pid != 0;
}

TEST(LauncherTest, StopsAndGoesOnWithItsRanks) {
  LauncherProcess launcher("train");
  ASSERT_TRUE(launcher.AwaitLines("ready", 2)) << launcher.output();
  launcher.Signal(SIGTSTP);
  ASSERT_TRUE(AChildStops());
  launcher.Signal(SIGCONT);
  launcher.Signal(SIGINT);
  EXPECT_EQ(launcher.Wait(), 128 + SIGINT);
  EXPECT_THAT(launcher.output(), HasSubstr("[1] stopped by 2"));
}

// Ranks that do not answer what they are doing go on.
TEST(LauncherTest, SignalsThatInspectEndNobody) {
  LauncherProcess launcher("refuse_to_stop");
  ASSERT_TRUE(launcher.AwaitLines("ready", 2)) << launcher.output();
  for (const int signal : {SIGQUIT, SIGUSR1, SIGINT}) {
    launcher.Signal(signal);
  }
  EXPECT_TRUE(launcher.AwaitLines("no", 2)) << launcher.output();
  launcher.Signal(SIGINT);
  EXPECT_EQ(launcher.Wait(), 128 + SIGINT);
}

// Ranks ignore the signal until they have a handler, and get it then.
TEST(LauncherTest, SchedulersSignalReachesRanksThatAreStillStarting) {
  LauncherProcess launcher("train_late");
  EXPECT_EQ(launcher.Wait(), 128 + SIGUSR1);
  EXPECT_THAT(launcher.output(), HasSubstr("[0] stopped by 10"));
}

TEST(LauncherTest, RefusesBadOptions) {
  const std::pair<std::function<void(LaunchOptions&)>, std::string> cases[] = {
      {[](auto& o) { o.ranks = 0; }, "at least 1"},
      {[](auto& o) { o.argv.clear(); }, "argv is empty"},
      {[](auto& o) { o.restarts.max_restarts = -1; }, "max_restarts is -1"},
      {[](auto& o) { o.restarts.min_ranks = 3; }, "min_ranks is 3"},
  };
  for (const auto& [change, what] : cases) {
    LaunchOptions options = Options("print", 2);
    change(options);
    EXPECT_THAT(Launch(options),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(what)));
  }
  LaunchOptions options = Options("print", 2);
  options.program = "/no/such/program";
  EXPECT_THAT(Launch(options), StatusIs(absl::StatusCode::kFailedPrecondition,
                                        AllOf(HasSubstr("rank 0 of 2"),
                                              HasSubstr("/no/such/program"),
                                              HasSubstr("No such file"))));
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

TEST(LauncherOutputTest, RanksGoOnWhenTheReaderHasGone) {
  int fds[2];
  ASSERT_EQ(pipe2(fds, O_CLOEXEC), 0);
  const UniqueFd out(fds[1]);
  close(fds[0]);
  LaunchOptions options = Options("print_much", 2);
  options.stdout_fd = out.get();
  ASSERT_OK_AND_ASSIGN(const LaunchReport report, LaunchRanks(options));
  EXPECT_EQ(report.exit_code(), 0) << report.ToString();
}

TEST(LauncherOutputTest, ALimitOnTheSizeOfFilesIsAFailure) {
  const UniqueFd out(memfd_create("output", MFD_CLOEXEC));
  LaunchOptions options = Options("print_much", 2);
  options.stdout_fd = out.get();
  // ThreadSanitizer writes half a mebibyte in each rank.
  const ResourceLimit limit(RLIMIT_FSIZE, 1000000);
  ASSERT_OK_AND_ASSIGN(const LaunchReport report, LaunchRanks(options));
  EXPECT_EQ(report.output_errno, EFBIG);
  EXPECT_EQ(report.exit_code(), EXIT_FAILURE);
  EXPECT_EQ(ReadAll(out.get()).size(), 1000000);
}

TEST(LauncherCauseTest, ARankThatWasToldOfAFailureIsNotBlamed) {
  const Fifo fifo;
  LaunchOptions options = Options("rank_1_fails_after_its_echo", 2);
  options.grace_period = kLimit;
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
                       LaunchRanks(Options("both_are_told_of_a_failure", 2)));
  EXPECT_GE(report.first_failed_rank, 0);
  EXPECT_EQ(report.exit_code(), kPeerFailedExitCode);
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
      launched.out,
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
  EXPECT_THAT(launched.out,
              AllOf(HasSubstr("[1] rank 1 of 3, restart 0 of 5\n"),
                    HasSubstr("[1] rank 1 of 2, restart 1 of 5\n"),
                    HasSubstr("\nrestart 2 of 5, with 1 rank, in"),
                    HasSubstr("[0] rank 0 of 1, restart 2 of 5\n")));
}

TEST(LauncherRestartsTest, EachAttemptHasAPortAndNothingOfTheOneBefore) {
  Fifo fifo;
  fifo.Watch();
  for (const auto& [role, ranks] :
       {std::pair("use_the_port_after_a_failure", 2),
        {"leave_grandchild_and_fail", 1}}) {
    ASSERT_OK_AND_ASSIGN(const Launched launched,
                         LaunchWith(fifo, Options(role, ranks, 1)));
    EXPECT_EQ(launched.report.exit_code(), 0) << launched.report.ToString();
    EXPECT_EQ(launched.report.failed_attempts.size(), 1);
  }
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

int main(int argc, char** argv) {
  if (const auto code = fsdp::comm::PlayRole(); code.has_value()) return *code;
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
