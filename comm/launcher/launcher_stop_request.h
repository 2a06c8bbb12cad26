// A signal as a wish that a training loop reads between two steps.
#ifndef COMM_LAUNCHER_LAUNCHER_STOP_REQUEST_H_
#define COMM_LAUNCHER_LAUNCHER_STOP_REQUEST_H_

#include <signal.h>

#include <array>

#include "absl/time/time.h"

namespace fsdp::comm {

// While it exists, SIGINT, SIGTERM and SIGUSR1, by which schedulers announce
// the end of a job's time, are noted instead of ending the process. A second
// SIGINT or SIGTERM ends it, unless it comes within `apart` of the first one:
// launchers pass on what the terminal or the scheduler has sent to the ranks as
// well. A SIGINT or SIGTERM that the process ignores stays ignored. At most one
// StopRequest exists at a time in a process.
//
// Make it at the beginning of main(), before RunRanks(), which then heeds it
// while ranks connect, gives them `period` to stop in when the launcher is told
// to end, and returns 128 + the signal where the program's function returns
// StoppedError() (comm/launcher/launcher_report.h). Ranks learn of a signal one
// by one and have to agree on the step after which they stop:
// checkpoint::RunGuard does that.
class StopRequest {
 public:
  explicit StopRequest(absl::Duration period = absl::Minutes(2),
                       absl::Duration apart = absl::Seconds(1));
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;
  ~StopRequest();  // restores what was, but for what was changed since

  // The one that exists; null: there is none.
  static const StopRequest* Current();

  // The first signal that has come; 0: none. Thread-safe.
  int signal() const;
  bool requested() const { return signal() != 0; }

  // How long the ranks of this program may take from the signal to their end.
  absl::Duration period() const { return period_; }

 private:
  const absl::Duration period_;
  std::array<struct sigaction, 3> previous_ = {};
};

// Questions to a process that starts ranks, while it has none.

// From now on SIGQUIT and SIGUSR1, by which LaunchRanks() asks the ranks what
// they are doing, do not end this process, unless it has handlers for them:
// whoever asks may do so before the ranks are there, and after they have ended.
void IgnoreQuestions();

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_LAUNCHER_STOP_REQUEST_H_
