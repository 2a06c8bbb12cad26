// Starts the ranks of a job on this host.
#ifndef COMM_LAUNCHER_LAUNCHER_H_
#define COMM_LAUNCHER_LAUNCHER_H_

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/launcher/process_end.h"

namespace fsdp::comm {

// The exit code by which a rank says that it ends because another one has
// failed, which is then the one to blame.
inline constexpr int kPeerFailedExitCode = 113;

// That for Aborted, with which communicators pass on what another rank has
// failed with; EXIT_SUCCESS for OK, EXIT_FAILURE for all else. What a rank's
// main() should return.
int ExitCodeOf(const absl::Status& status);

struct LaunchOptions {
  int ranks = 1;
  std::vector<std::string> argv;  // of every rank, argv[0] included
  std::string program = "/proc/self/exe";

  // Set for the ranks, over what this process has: NAME, value.
  std::vector<std::pair<std::string, std::string>> environment;

  // How long the other ranks may go on when one has failed, since they may be
  // about to say why; then they get SIGTERM.
  absl::Duration grace_period = absl::Seconds(10);

  // How long ranks may take to end when the launcher is told to and has told
  // them; then they get SIGKILL.
  absl::Duration stop_period = absl::Seconds(10);

  // From SIGTERM to SIGKILL.
  absl::Duration terminate_period = absl::Seconds(3);

  // Where the output of ranks goes; not owned.
  int stdout_fd = 1;
  int stderr_fd = 2;
};

struct RankEnd {
  ProcessEnd end;
  bool forced = false;  // killed by a signal of the launcher
};

struct LaunchReport {
  std::vector<RankEnd> ranks;  // by rank

  // The rank that, before the launcher ended any, was the first to end other
  // than by exiting with 0; of several at about the same time, one that was
  // killed. One that only says that another one has failed,
  // kPeerFailedExitCode, gives way to that one. -1: none.
  int first_failed_rank = -1;

  // The signal that told the launcher to end; 0: none.
  int interrupt_signal = 0;

  // Why what ranks have printed could not be written; 0: it was, or nobody
  // reads it any more.
  int output_errno = 0;

  // 0 where all is well; 128 + interrupt_signal; else that of the rank that
  // failed first: its exit code, or 128 + the signal that killed it; else 1
  // where output could not be written.
  int exit_code() const;

  // "rank 2 was killed by signal 9 (SIGKILL); then rank 0 exited with code 1".
  std::string ToString() const;
};

// Runs options.ranks > 0 copies of the program and returns when all have ended.
// They get torchrun's variables, a free port on the loopback interface
// (ReadEnvironment knows where to take it from), a secret of the job unless
// FSDP_JOB_SECRET is set, OMP_NUM_THREADS = this host's
// cores divided by the ranks unless it is set, and, where stdout_fd is a
// terminal, what TerminalColumns() reads.
//
// The ranks' output comes out in whole lines after "[rank] ". When one fails
// the others are ended as LaunchOptions says; stopped ones too. SIGINT, SIGTERM
// and SIGHUP to this process are passed on, a second one kills all ranks at
// once, and once they have ended one is enough to give up a reader that does
// not read; SIGTSTP stops and continues them with this process; SIGQUIT and
// SIGUSR1 are passed on for the ranks to show what they are doing, and ranks
// that do not handle them ignore them. Another signal that the process ignores,
// such as SIGHUP under nohup, stays ignored. Ranks, and what they leave in
// their process groups, never outlive the call; ranks do not outlive this
// process either, however it ends.
//
// To be called from the main thread while there is no other, before LibTorch is
// used. Handles the signals named above and SIGCHLD until it returns; other
// children of this process are left alone.
absl::StatusOr<LaunchReport> LaunchRanks(const LaunchOptions& options);

// The columns that a progress line on standard output may take; nullopt where
// that is no terminal. Ranks ask for their launcher's terminal.
std::optional<int> TerminalColumns();

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_LAUNCHER_H_
