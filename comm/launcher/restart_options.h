// Whether and how a job of which a rank has failed is started again.
#ifndef COMM_LAUNCHER_RESTART_OPTIONS_H_
#define COMM_LAUNCHER_RESTART_OPTIONS_H_

#include <cstdint>
#include <functional>

#include "absl/time/time.h"
#include "comm/launcher/launcher_report.h"

namespace fsdp::comm {

// A rank that was killed, has crashed or exits with another code than 0 makes
// its job restart, unless the code is kUsageErrorExitCode or somebody has told
// the launcher to end. The functions are called by LaunchRanks(), in its
// thread, while no rank runs.
struct RestartOptions {
  int max_restarts = 0;  // 0: none

  // With how many ranks: what it returns for the attempt that has failed, such
  // as RanksLeft(). Empty: with as many as before.
  std::function<int(const LaunchAttempt& failed)> on_restart;

  // With fewer than this the job ends instead.
  int min_ranks = 1;

  // A number that rises as the job gets on, such as the step of its newest
  // checkpoint. Empty: an attempt of a minute has got on.
  std::function<int64_t()> progress;

  // The job ends once so many attempts in a row have not got on.
  int max_without_progress = 3;

  // Before a restart; doubled with each attempt in a row that has not got on,
  // up to longest_pause.
  absl::Duration pause = absl::Seconds(1);
  absl::Duration longest_pause = absl::Seconds(30);
};

// How many ranks of an attempt are left: all but the first that failed and
// those that were killed by others than the launcher, SIGABRT excepted, by
// which a rank ends itself.
int RanksLeft(const LaunchAttempt& failed);

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_RESTART_OPTIONS_H_
