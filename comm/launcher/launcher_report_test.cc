// Tests what LaunchReport makes of ends of ranks; launcher_test has real ones.
#include <signal.h>

#include <cerrno>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "comm/launcher/launch_options.h"
#include "comm/launcher/processes/process_end.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

RankEnd Exited(int code) { return {ProcessEnd{code, 0}, false}; }
RankEnd Told(RankEnd end) {
  end.was_told = true;
  return end;
}
RankEnd Killed(int signal) { return {ProcessEnd{0, signal}, false}; }
RankEnd Ended(int signal) { return {ProcessEnd{0, signal}, true}; }

struct Case {
  std::vector<RankEnd> ranks;
  int first_failed = -1;
  int interrupt_signal = 0;
  int output_errno = 0;
  int exit_code;
  std::string text;
};

const Case kCases[] = {
    {{Exited(0)}, -1, 0, 0, 0, "rank 0 exited with code 0"},
    {{Exited(0), Exited(0)}, -1, 0, 0, 0, "ranks 0, 1 exited with code 0"},
    {{Exited(3)}, 0, 0, 0, 3, "rank 0 exited with code 3"},
    {{Exited(0), Killed(SIGKILL), Exited(113)},
     1,
     0,
     0,
     128 + SIGKILL,
     "rank 1 was killed by signal 9 (SIGKILL); then rank 0 exited with code "
     "0, rank 2 exited with code 113 (another rank had failed)"},
    {{Ended(SIGTERM), Exited(1), Ended(SIGTERM)},
     1,
     0,
     0,
     1,
     "rank 1 exited with code 1; then ranks 0, 2 were ended by the launcher "
     "with signal 15 (SIGTERM)"},
    {{Killed(SIGUSR1)},
     0,
     0,
     0,
     128 + SIGUSR1,
     "rank 0 was killed by signal 10 (SIGUSR1)"},
    {{Exited(128 + SIGTERM), Exited(128 + SIGTERM)},
     1,
     0,
     0,
     128 + SIGTERM,
     "rank 1 exited with code 143 (told to stop by signal 15 (SIGTERM)); then "
     "rank 0 exited with code 143 (told to stop by signal 15 (SIGTERM))"},
    {{Exited(0), Killed(SIGINT)},
     -1,
     SIGINT,
     0,
     128 + SIGINT,
     "interrupted by signal 2 (SIGINT); then rank 0 exited with code 0, rank "
     "1 was killed by signal 2 (SIGINT)"},
    // The ranks had finished before they learned of the signal.
    {{Exited(0), Exited(0)},
     -1,
     SIGTERM,
     0,
     0,
     "interrupted by signal 15 (SIGTERM); then ranks 0, 1 exited with code 0"},
    {{Told(Exited(128 + SIGTERM)), Told(Exited(113)), Told(Exited(1))},
     -1,
     SIGTERM,
     0,
     1,
     "interrupted by signal 15 (SIGTERM); then rank 2 exited with code 1, rank "
     "1 exited with code 113 (another rank had failed), rank 0 exited with "
     "code 143 (told to stop by signal 15 (SIGTERM))"},
    {{Told(Ended(SIGTERM)), Told(Killed(SIGSEGV))},
     -1,
     SIGTERM,
     0,
     128 + SIGSEGV,
     "interrupted by signal 15 (SIGTERM); then rank 0 was ended by the "
     "launcher with signal 15 (SIGTERM), rank 1 was killed by signal 11 "
     "(SIGSEGV)"},
    {{Told(Ended(SIGTERM)), Told(Exited(113))},
     -1,
     SIGTERM,
     0,
     128 + SIGTERM,
     "interrupted by signal 15 (SIGTERM); then rank 0 was ended by the "
     "launcher with signal 15 (SIGTERM), rank 1 exited with code 113 (another "
     "rank had failed)"},
    // The launcher's signal decides its exit code, whoever has failed before.
    {{Exited(3)},
     0,
     SIGTERM,
     0,
     128 + SIGTERM,
     "interrupted by signal 15 (SIGTERM); rank 0 exited with code 3"},
    {{Exited(0)},
     -1,
     0,
     ENOSPC,
     1,
     "rank 0 exited with code 0; what they printed could not be written: No "
     "space left on device"},
    {{Exited(3)},
     0,
     0,
     EFBIG,
     3,
     "rank 0 exited with code 3; what they printed could not be written: "
     "File too large"},
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

TEST(LaunchReportTest, OneAttemptNeedsNoNumber) {
  LaunchReport report;
  report.ranks = {Exited(2)};
  report.first_failed_rank = 0;
  report.gave_up = "it would fail again";
  EXPECT_EQ(report.ToString(),
            "rank 0 exited with code 2\nnot restarted: it would fail again");
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

}  // namespace
}  // namespace fsdp::comm
