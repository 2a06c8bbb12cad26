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

// On one thread and one poll(). Each launcher ends the ranks of its replica by
// itself; here signals are passed on to them, and their output, which has its
// labels already.
class ReplicasSupervisor {
 public:
  struct Options {
    // How long launchers may take to end that have been told to; then they get
    // SIGKILL.
    absl::Duration stop_period;
    int stdout_fd = 1;
    int stderr_fd = 2;
  };

  // `signals` outlives it.
  ReplicasSupervisor(const Options& options, SignalQueue* signals,
                     ChildProcess keeper, std::vector<ChildProcess> launchers);

  // Returns once all launchers have ended and what has been printed is written,
  // or nobody is waited for that does not read it. To be called once. The
  // keeper ends with this object.
  ReplicasReport Run();

 private:
  size_t alive() const { return launchers_.size() - reaped_; }
  void WaitForReader();
  void HandleSignals();
  void OnSignal(int signal);
  void End(int signal);
  void PassOn(int signal);
  // After SIGTSTP, once all launchers have stopped their ranks and themselves.
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
  std::vector<bool> has_stopped_;  // by replica, where `stops_`
  ReplicasReport report_;
  absl::Time deadline_ = absl::InfiniteFuture();
};

}  // namespace fsdp::comm

#endif  // REPLICAS_LAUNCHER_REPLICAS_SUPERVISOR_H_
