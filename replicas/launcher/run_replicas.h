// A program whose ranks are processes, in replicas that outlive each other.
#ifndef REPLICAS_LAUNCHER_RUN_REPLICAS_H_
#define REPLICAS_LAUNCHER_RUN_REPLICAS_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/launcher/launch_options.h"
#include "comm/startup/environment.h"

namespace fsdp::comm {

// What one rank of a replica does; `environment` says of which one. Without
// replicas environment.replicas is 0.
using ReplicaMain = std::function<absl::Status(
    std::shared_ptr<Communicator> ranks, const Environment& environment)>;

struct ReplicaCounts {
  int replicas = 0;  // 0: none, as RunRanks()
  int ranks = 1;     // of each, or of the job
};

// RunRanks() (comm/run_ranks/run_ranks.h) for a job of replicas that outlive
// each other, --replicas=2 --ranks=4: LaunchReplicas()
// (replicas/launcher/launch_replicas.h) starts them and their keeper on this
// host. Where the environment says already which replica this is, as on several
// hosts with `tools/keeper`, only its ranks are started, or this process is one
// of them; counts.replicas is then that number, or 0. `restarts` are those of
// each replica. Returns ReplicasReport::exit_code() in the process that has
// started replicas.
int RunReplicas(int argc, char** argv, const ReplicaCounts& counts,
                const ReplicaMain& fn, const ConnectOptions& options = {},
                const RestartOptions& restarts = {});

}  // namespace fsdp::comm

#endif  // REPLICAS_LAUNCHER_RUN_REPLICAS_H_
