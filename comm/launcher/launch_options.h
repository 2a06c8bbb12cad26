// A launcher and the program that it starts agree on what is started, how it is
// told to stop and ends, and when it is started again.
#ifndef COMM_LAUNCHER_LAUNCH_OPTIONS_H_
#define COMM_LAUNCHER_LAUNCH_OPTIONS_H_

#include <signal.h>

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

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

// While it exists, SIGINT, SIGTERM and SIGUSR1, by which schedulers announce
// the end of a job's time, are noted instead of ending the process. A second
// SIGINT or SIGTERM ends it, unless it comes within `apart` of the first one:
// the terminal or the scheduler may send a signal to the ranks that their
// launcher passes on, too. A SIGINT or SIGTERM that the process ignores stays
// ignored. A process has at most one StopRequest at a time.
//
// Make it at the beginning of main(), before RunRanks(), which heeds it. Ranks
// learn of a signal at different times and have to agree on the step after
// which they stop: checkpoint::RunGuard does that.
class StopRequest {
 public:
  explicit StopRequest(absl::Duration period = absl::Minutes(2),
                       absl::Duration apart = absl::Seconds(1));
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;
  ~StopRequest();  // restores the handlers that nobody has changed since

  // Returns the StopRequest of this process, or null.
  static const StopRequest* Current();

  // Returns the first signal that has come, or 0. Thread-safe.
  int signal() const;
  // Returns whether one has come. Thread-safe.
  bool requested() const { return signal() != 0; }

  // The ranks of this program may take this long from the signal to their end.
  absl::Duration period() const { return period_; }

 private:
  const absl::Duration period_;
  std::array<struct sigaction, 3> previous_ = {};
};

// Makes a process that starts ranks ignore SIGQUIT and SIGUSR1, unless it has
// handlers for them. LaunchRanks() passes them on to ask ranks what they are
// doing, but somebody may ask before ranks exist or after they have ended.
void IgnoreQuestions();

// How a process has ended.
struct ProcessEnd {
  int exit_code = 0;  // if it exited by itself
  int signal = 0;     // that killed it; 0: it exited by itself
};

// Returns the signal that had told a rank to stop which has ended like this; 0
// if none had.
int StopSignalOf(const ProcessEnd& end);

// Returns a text such as "signal 9 (SIGKILL)".
std::string SignalText(int signal);

// How a rank has ended, and who has ended it.
struct RankEnd {
  ProcessEnd end;         // of its process
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

  absl::Duration lasted;  // from its start to its end

  // For people: "rank 2 was killed by signal 9 (SIGKILL); then rank 0 exited
  // with code 1".
  std::string ToString() const;
};

// How a job has ended: as its last attempt, after failed_attempts.
struct LaunchReport : LaunchAttempt {
  // The signal that told the launcher to end; 0: none.
  int interrupt_signal = 0;

  // The error with which output of the ranks could not be written; 0: it was
  // written, or its reader has gone.
  int output_errno = 0;

  // The attempts before, which failed; oldest first.
  std::vector<LaunchAttempt> failed_attempts;

  // Says why a job that may be restarted was not restarted, or not again. Else
  // empty.
  std::string gave_up;

  // Returns the exit code for the job. If the launcher was told to end, it is
  // the code of a rank that failed instead of stopping, else 0 if all ranks
  // exited with 0, else 128 + interrupt_signal. Otherwise it is the code of the
  // rank that failed first. The code of a killed rank is 128 + its signal. A
  // job that succeeded has 1 where output could not be written, else 0.
  int exit_code() const;

  // For people: how the ranks have ended. Each of several attempts has a line,
  // "attempt 1 (3 ranks, 12s): ...".
  std::string ToString() const;
};

// Selects when a job is started again: where a rank was killed, crashed or
// exited with a code other than 0, unless that code is kUsageErrorExitCode or
// says that the rank was told to stop (StopSignalOf()), or the launcher has
// been told to end. LaunchRanks() calls the functions in its thread, while no
// rank runs.
struct RestartOptions {
  int max_restarts = 0;  // 0: none

  // Returns the number of ranks of the next attempt, such as RanksLeft(), for
  // the one that has failed. Empty: as many as before.
  std::function<int(const LaunchAttempt& failed)> on_restart;

  // With fewer ranks than this the job ends instead.
  int min_ranks = 1;

  // Returns a number that rises as the job makes progress, such as the step of
  // its newest saved run. Empty: an attempt of a minute has made progress.
  std::function<int64_t()> progress;

  // The job ends once so many attempts in a row have made no progress.
  int max_without_progress = 3;

  // The pause before a restart. It doubles with each further attempt in a row
  // that has made no progress, up to longest_pause.
  absl::Duration pause = absl::Seconds(1);
  absl::Duration longest_pause = absl::Seconds(30);
};

// Returns how many ranks of an attempt are left: all except the first that
// failed and those killed by a signal that the launcher has not sent. SIGABRT
// does not count, since a rank ends itself by it.
int RanksLeft(const LaunchAttempt& failed);

// Options of LaunchRanks(), which starts ranks on this host.
struct LaunchOptions {
  int ranks = 1;                           // how many are started
  std::vector<std::string> argv;           // of every rank, argv[0] included
  std::string program = "/proc/self/exe";  // by default the running one

  // Variables of the ranks, as (NAME, value). They replace those of this
  // process.
  std::vector<std::pair<std::string, std::string>> environment;

  // When one rank has failed, the others may go on for this long, since they
  // may be about to say why. Then they get SIGTERM.
  absl::Duration grace_period = absl::Seconds(10);

  // Once the launcher has been told to end and has told the ranks, they may
  // take this long. Then they get SIGKILL.
  absl::Duration stop_period = absl::Seconds(10);

  // A second signal kills the ranks, but not if it comes within this time after
  // the first one: terminals and schedulers send the same signal to the
  // launcher and to its group at nearly the same time.
  absl::Duration signals_apart = absl::Seconds(1);

  // If true, SIGUSR1, by which schedulers announce the end of a job's time,
  // tells the job to end. The ranks get it, may ignore it while they start, and
  // are not killed after it. If false, SIGUSR1 asks ranks what they are doing.
  bool ends_by_usr1 = false;

  // The time from SIGTERM to SIGKILL.
  absl::Duration terminate_period = absl::Seconds(3);

  // By default the job is never started again.
  RestartOptions restarts;

  // The output of the ranks and messages about restarts go here. Not owned.
  int stdout_fd = 1;
  int stderr_fd = 2;
};

// Returns InvalidArgument for options with which LaunchRanks() would not start.
absl::Status CheckLaunchOptions(const LaunchOptions& options);

// Returns the value that a variable has for the ranks, from options.environment
// or this process's environment; null if it is not set. Valid until one of them
// changes.
const char* FindVariable(const LaunchOptions& options, const char* name);

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_LAUNCH_OPTIONS_H_
