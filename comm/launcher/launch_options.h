// Options of a launcher: what it starts, how it ends it, and when it starts it
// again.
#ifndef COMM_LAUNCHER_LAUNCH_OPTIONS_H_
#define COMM_LAUNCHER_LAUNCH_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "comm/launcher/launcher_report.h"

namespace fsdp::comm {

// A job is started again if a rank was killed, crashed or exited with a code
// other than 0, unless that code is kUsageErrorExitCode or says that the rank
// was told to stop (StopSignalOf()), or the launcher has been told to end.
// LaunchRanks() calls the functions in its thread, while no rank runs.
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

struct LaunchOptions {
  int ranks = 1;
  std::vector<std::string> argv;  // of every rank, argv[0] included
  std::string program = "/proc/self/exe";

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
