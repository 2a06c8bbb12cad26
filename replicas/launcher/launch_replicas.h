// Starts the replicas of a job on this host.
#ifndef REPLICAS_LAUNCHER_LAUNCH_REPLICAS_H_
#define REPLICAS_LAUNCHER_LAUNCH_REPLICAS_H_

#include "absl/status/statusor.h"
#include "comm/launcher/launch_options.h"
#include "replicas/launcher/replicas_report.h"

namespace fsdp::comm {

// Runs `replicas` > 0 times what LaunchRanks(options) runs, each with a
// launcher of its own, and returns when all have ended. Replicas outlive each
// other: what becomes of one is nothing to the others. Of each options.restarts
// are its own, with as many ranks each time (on_restart is refused), and a line
// that its launcher says begins with "replica 1: ".
//
// The ranks get the variables of replicas that ReadEnvironment() reads, besides
// those of LaunchRanks(). FSDP_REPLICA_STORE is a keeper on the loopback
// interface, a process that serves an empty store until all replicas have
// ended; the secret, drawn unless FSDP_JOB_SECRET is set, is that of all
// replicas. Cores are divided by all ranks. Where the keeper ends all is ended.
//
// Signals are those of LaunchRanks(), and reach the ranks of all replicas.
// Standard output is no terminal for the ranks. Ranks, launchers and the keeper
// never outlive the call, nor this process, however it ends.
//
// To be called as LaunchRanks(), which see.
absl::StatusOr<ReplicasReport> LaunchReplicas(int replicas,
                                              const LaunchOptions& options);

}  // namespace fsdp::comm

#endif  // REPLICAS_LAUNCHER_LAUNCH_REPLICAS_H_
