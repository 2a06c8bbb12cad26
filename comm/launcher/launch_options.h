// What a launcher starts, and how it ends it.
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

// Whether and how a job of which a rank has failed is started again.

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

  // How long after a first signal a second one is taken for a wish of its own,
  // which kills: schedulers and terminals send one to the launcher and to its
  // group at nearly the same time.
  absl::Duration signals_apart = absl::Seconds(1);

  // Whether SIGUSR1 tells the job to end, as schedulers announce the end of its
  // time: it is passed on until all ranks have ended, which may ignore it while
  // they start, and nobody is killed by it. Otherwise it asks ranks what they
  // are doing.
  bool ends_by_usr1 = false;

  // From SIGTERM to SIGKILL.
  absl::Duration terminate_period = absl::Seconds(3);

  // Whether the job is started again when a rank has failed. By default never.
  RestartOptions restarts;

  // Where the output of ranks goes, and what is said of restarts; not owned.
  int stdout_fd = 1;
  int stderr_fd = 2;
};

// InvalidArgument where LaunchRanks() would not start.
absl::Status CheckLaunchOptions(const LaunchOptions& options);

// What a variable is for the ranks, by options.environment or by this process's
// environment; null: it is not set. Valid until one of them changes.
const char* FindVariable(const LaunchOptions& options, const char* name);

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_LAUNCH_OPTIONS_H_
