// Says how the ranks of a job have ended, and what their exit codes mean.
#ifndef COMM_LAUNCHER_LAUNCHER_REPORT_H_
#define COMM_LAUNCHER_LAUNCHER_REPORT_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/launcher/processes/process_end.h"

namespace fsdp::comm {

// The exit code of a rank that ends because another one has failed, which is
// then the one to blame.
inline constexpr int kPeerFailedExitCode = 113;

// The exit code of a rank that was asked for something impossible. It would
// fail again, so its job is not restarted.
inline constexpr int kUsageErrorExitCode = 2;

// Returns Cancelled, for a run that ends because `signal` has told it to.
absl::Status StoppedError(int signal, absl::string_view text);

// Returns what a rank's main() should return for `status`: EXIT_SUCCESS for OK,
// 128 + the signal for a StoppedError(), kPeerFailedExitCode for Aborted, with
// which communicators pass on the failure of another rank, kUsageErrorExitCode
// for InvalidArgument, else EXIT_FAILURE.
int ExitCodeOf(const absl::Status& status);

// Returns the signal that had told a rank to stop which has ended like this; 0
// if none had.
int StopSignalOf(const ProcessEnd& end);

// Returns a text such as "signal 9 (SIGKILL)".
std::string SignalText(int signal);

struct RankEnd {
  ProcessEnd end;
  bool forced = false;    // killed by a signal of the launcher
  bool was_told = false;  // it ended after the launcher was told to end
};

// One start of all ranks.
struct LaunchAttempt {
  std::vector<RankEnd> ranks;  // by rank

  // The first rank that did not exit with 0, before the launcher ended any. Of
  // several at about the same time it is one that was killed. A rank that only
  // says that another one has failed, by kPeerFailedExitCode, gives way to that
  // one. -1: none.
  int first_failed_rank = -1;

  absl::Duration lasted;

  // For people: "rank 2 was killed by signal 9 (SIGKILL); then rank 0 exited
  // with code 1".
  std::string ToString() const;
};

struct LaunchReport {
  // These are of the last attempt, which decides; see LaunchAttempt.
  std::vector<RankEnd> ranks;
  int first_failed_rank = -1;

  // The signal that told the launcher to end; 0: none.
  int interrupt_signal = 0;

  // The error with which output of the ranks could not be written; 0: it was
  // written, or its reader has gone.
  int output_errno = 0;

  absl::Duration lasted;  // the last attempt

  // The attempts before, which failed; oldest first.
  std::vector<LaunchAttempt> failed_attempts;

  // Says why a job that may be restarted was not restarted, or not again. Else
  // empty.
  std::string gave_up;

  LaunchAttempt last_attempt() const;

  // Returns the exit code for the job. If the launcher was told to end, it is
  // the code of a rank that failed instead of stopping, else 0 if all ranks
  // exited with 0, else 128 + interrupt_signal. Otherwise it is the code of the
  // rank that failed first. The code of a killed rank is 128 + its signal. A
  // job that succeeded has 1 where output could not be written, else 0.
  int exit_code() const;

  // For people: how the ranks have ended. Of several attempts each has a line,
  // "attempt 1 (3 ranks, 12s): ...".
  std::string ToString() const;
};

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_LAUNCHER_REPORT_H_
