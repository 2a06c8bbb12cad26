// Decides whether a job is started again, from its attempts one by one.
#ifndef COMM_LAUNCHER_RESTART_POLICY_H_
#define COMM_LAUNCHER_RESTART_POLICY_H_

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "comm/launcher/launch_options.h"

namespace fsdp::comm {

class RestartPolicy {
 public:
  // Make it before the first attempt. `options` outlives it.
  explicit RestartPolicy(const RestartOptions& options);

  struct Decision {
    int ranks = 0;         // of the next attempt; 0: there is none
    absl::Duration pause;  // before it
    std::string why_none;
  };

  // Decides what comes after `attempt`, which has failed.
  Decision Decide(const LaunchAttempt& attempt);

  int restarts() const { return restarts_; }  // so far

 private:
  bool HasGotOn(const LaunchAttempt& attempt);
  absl::Duration Pause() const;

  const RestartOptions& options_;
  int64_t progress_ = 0;
  int restarts_ = 0;
  int without_progress_ = 0;  // attempts in a row
};

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_RESTART_POLICY_H_
