// Turns signals into a request that a training loop reads between two steps.
#ifndef COMM_LAUNCHER_LAUNCHER_STOP_REQUEST_H_
#define COMM_LAUNCHER_LAUNCHER_STOP_REQUEST_H_

#include <signal.h>

#include <array>

#include "absl/time/time.h"

namespace fsdp::comm {

// While it exists, SIGINT, SIGTERM and SIGUSR1, by which schedulers announce
// the end of a job's time, are noted instead of ending the process. A second
// SIGINT or SIGTERM ends it, unless it comes within `apart` of the first one:
// the terminal or the scheduler may send a signal to the ranks that their
// launcher passes on, too. A SIGINT or SIGTERM that the process ignores stays
// ignored. A process has at most one StopRequest at a time.
//
// Make it at the beginning of main(), before RunRanks(). That heeds it while
// ranks connect, gives them `period` to stop when the launcher is told to end,
// and returns 128 + the signal if the program's function returns StoppedError()
// (comm/launcher/launch_options.h). Ranks learn of a signal at different times
// and have to agree on the step after which they stop: checkpoint::RunGuard
// does that.
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

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_LAUNCHER_STOP_REQUEST_H_
