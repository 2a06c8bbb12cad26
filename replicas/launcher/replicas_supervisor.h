// Runs the launchers of a job's replicas, and their keeper, to their end.
#ifndef REPLICAS_LAUNCHER_REPLICAS_SUPERVISOR_H_
#define REPLICAS_LAUNCHER_REPLICAS_SUPERVISOR_H_

#include <cstddef>
#include <vector>

#include "absl/time/time.h"
#include "comm/launcher/processes/child_process.h"
#include "comm/launcher/processes/output_merger.h"
#include "replicas/launcher/replicas_report.h"

namespace fsdp::comm {

// Works on one thread with one poll(). Each launcher ends the ranks of its own
// replica; this class passes signals on to launchers, and their output, which
// has its labels already.
class ReplicasSupervisor {
 public:
  struct Options {
    // How long launchers that were told to end may take until they get SIGKILL.
    absl::Duration stop_period;
    int stdout_fd = 1;
    int stderr_fd = 2;
  };

  // `signals` outlives it.
  ReplicasSupervisor(const Options& options, SignalQueue* signals,
                     ChildProcess keeper, std::vector<ChildProcess> launchers);

  // Returns when all launchers have ended and their output is written, or
  // nobody who reads it is waited for any longer. Call it once. The keeper ends
  // with this object.
  ReplicasReport Run();

 private:
  size_t alive() const { return launchers_.size() - reaped_; }
  void WaitForReader();
  void HandleSignals();
  void OnSignal(int signal);
  void End(int signal);
  void PassOn(int signal);
  // Called after SIGTSTP, when all launchers have stopped their ranks and
  // themselves.
  void StopWithAll();
  void Reap();
  void LookAfterKeeper();

  const Options options_;
  SignalQueue* const signals_;
  ChildProcess keeper_;
  std::vector<ChildProcess> launchers_;  // by replica
  size_t reaped_ = 0;
  OutputPump output_;
  bool gives_output_up_ = false;
  bool stops_ = false;
  std::vector<bool> has_stopped_;  // by replica, while `stops_`
  ReplicasReport report_;
  absl::Time deadline_ = absl::InfiniteFuture();
};

}  // namespace fsdp::comm

#endif  // REPLICAS_LAUNCHER_REPLICAS_SUPERVISOR_H_
