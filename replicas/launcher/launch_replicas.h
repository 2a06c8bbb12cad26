// Starts the replicas of a job on this host.
#ifndef REPLICAS_LAUNCHER_LAUNCH_REPLICAS_H_
#define REPLICAS_LAUNCHER_LAUNCH_REPLICAS_H_

#include "absl/status/statusor.h"
#include "comm/launcher/launch_options.h"
#include "replicas/launcher/replicas_report.h"

namespace fsdp::comm {

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
// Standard output is no terminal for the ranks. Ranks, launchers and the keeper
// never outlive the call or this process, however it ends.
//
// LaunchRanks() says where and when it may be called.
absl::StatusOr<ReplicasReport> LaunchReplicas(int replicas,
                                              const LaunchOptions& options);

}  // namespace fsdp::comm

#endif  // REPLICAS_LAUNCHER_LAUNCH_REPLICAS_H_
