// Starts the replicas of a job on this host.
#ifndef REPLICAS_LAUNCHER_LAUNCH_REPLICAS_H_
#define REPLICAS_LAUNCHER_LAUNCH_REPLICAS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "comm/launcher/launch_options.h"

namespace fsdp::replicas {

// How the replicas of a job have ended.
struct ReplicasReport {
  // How each replica's launcher has ended, by replica. Its exit code is the
  // LaunchReport::exit_code() of the last attempt; not 0 means that the replica
  // was given up or told to end.
  std::vector<comm::ProcessEnd> replicas;

  // The last replica that has not ended with 0; -1: none.
  int last_failed_replica = -1;

  // The signal that told the launcher to end; 0: none.
  int interrupt_signal = 0;

  // The error if output could not be written; 0: it was written, or nobody
  // reads it any more.
  int output_errno = 0;

  // True if the keeper ended first, and with it all replicas.
  bool keeper_was_lost = false;

  // The job's exit code. Unless the launcher was told to end, it is 1 if the
  // keeper was lost or output could not be written. Otherwise it is 0 if at
  // least one replica has ended with 0, since the training has then come to its
  // end. Otherwise it is that of the replica that ended last: its exit code,
  // which is 128 + interrupt_signal if that stopped it, or 128 + the signal
  // that killed its launcher, interrupt_signal if there is one.
  int exit_code() const;

  // "replica 1 exited with code 137; replicas 0, 2 exited with code 0".
  std::string ToString() const;
};

// Runs `replicas` > 0 launchers, each of which does what LaunchRanks(options)
// does, and returns when all have ended. Replicas outlive each other. Each has
// its own options.restarts, with as many ranks each time (on_restart is
// refused), and its launcher's lines begin with "replica 1: ".
//
// The ranks get the variables of LaunchRanks(), and those of replicas that
// ReadEnvironment() reads. FSDP_REPLICA_STORE is a keeper on the loopback
// interface, a process that serves an empty store until all replicas have
// ended. All replicas have one secret, which is drawn unless FSDP_JOB_SECRET is
// set. Cores are divided among all ranks. If the keeper ends, all is ended.
//
// Signals are those of LaunchRanks() and reach the ranks of all replicas.
// Ranks, launchers and the keeper never outlive the call or this process,
// however it ends.
//
// LaunchRanks() says where and when it may be called.
absl::StatusOr<ReplicasReport> LaunchReplicas(
    int replicas, const comm::LaunchOptions& options);

}  // namespace fsdp::replicas

#endif  // REPLICAS_LAUNCHER_LAUNCH_REPLICAS_H_
