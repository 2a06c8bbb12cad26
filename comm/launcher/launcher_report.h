// What became of the ranks of a job, and what their exit codes say.
#ifndef COMM_LAUNCHER_LAUNCHER_REPORT_H_
#define COMM_LAUNCHER_LAUNCHER_REPORT_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/launcher/processes/process_end.h"

namespace fsdp::comm {

// The exit code by which a rank says that it ends because another one has
// failed, which is then the one to blame.
inline constexpr int kPeerFailedExitCode = 113;

// The exit code by which a rank says that it was asked for something that
// cannot be: it would fail again, and its job is not restarted.
inline constexpr int kUsageErrorExitCode = 2;

// Cancelled, for a run that ends because `signal` has told it to.
absl::Status StoppedError(int signal, absl::string_view text);

// 128 + the signal of a StoppedError(); kPeerFailedExitCode for Aborted, with
// which communicators pass on what another rank has failed with;
// kUsageErrorExitCode for InvalidArgument; EXIT_SUCCESS for OK, EXIT_FAILURE
// for all else. It is what a rank's main() should return.
int ExitCodeOf(const absl::Status& status);

// A rank that was told to stop by this signal has ended so; 0: by no signal.
int StopSignalOf(const ProcessEnd& end);

// "signal 9 (SIGKILL)".
std::string SignalText(int signal);

struct RankEnd {
  ProcessEnd end;
  bool forced = false;    // killed by a signal of the launcher
  bool was_told = false;  // it ended after the launcher was told to end
};

// One start of all ranks.
struct LaunchAttempt {
  std::vector<RankEnd> ranks;  // by rank

  // The rank that, before the launcher ended any, was the first to end other
  // than by exiting with 0; of several at about the same time, one that was
  // killed. One that only says that another one has failed,
  // kPeerFailedExitCode, gives way to that one. -1: none.
  int first_failed_rank = -1;

  absl::Duration lasted;

  // "rank 2 was killed by signal 9 (SIGKILL); then rank 0 exited with code 1".
  std::string ToString() const;
};

struct LaunchReport {
  // The last attempt, which decides; see LaunchAttempt.
  std::vector<RankEnd> ranks;
  int first_failed_rank = -1;

  // The signal that told the launcher to end; 0: none.
  int interrupt_signal = 0;

  // Why what ranks have printed could not be written; 0: it was, or nobody
  // reads it any more.
  int output_errno = 0;

  absl::Duration lasted;  // the last attempt

  // The attempts before, which failed; oldest first.
  std::vector<LaunchAttempt> failed_attempts;

  // Why a job that may be restarted was not, or not once more; empty where that
  // was no question.
  std::string gave_up;

  LaunchAttempt last_attempt() const;

  // 0 where all is well, also where the signal came too late to change that.
  // After a signal: that of a rank which failed to stop, or 128 +
  // interrupt_signal where none did. Else that of the rank that failed first:
  // its exit code, or 128 + the signal that killed it; else 1 where output
  // could not be written.
  int exit_code() const;

  // What became of the ranks; a line for each attempt, "attempt 1 (3 ranks,
  // 12s): ...", where there is more than one.
  std::string ToString() const;
};

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_LAUNCHER_REPORT_H_
