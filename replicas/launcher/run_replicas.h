// Runs a program whose ranks are processes, in replicas that outlive each
// other.
#ifndef REPLICAS_LAUNCHER_RUN_REPLICAS_H_
#define REPLICAS_LAUNCHER_RUN_REPLICAS_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/launcher/launch_options.h"
#include "comm/startup/environment.h"

namespace fsdp::replicas {

// The main function of one rank of a replica. `environment` says which replica;
// environment.replicas is 0 if there are no replicas.
using ReplicaMain =
    std::function<absl::Status(std::shared_ptr<comm::Communicator> ranks,
                               const comm::Environment& environment)>;

// How many processes a job has.
struct ReplicaCounts {
  int replicas = 0;  // 0: none, as in RunRanks()
  int ranks = 1;     // per replica, or of the job
};

// Does what RunRanks() (comm/run_ranks/run_ranks.h) does, for a job of replicas
// that outlive each other, --replicas=2 --ranks=4. LaunchReplicas() starts them
// and their keeper on this host. If the environment says which replica this is,
// as on several hosts with `tools/keeper`, only its ranks are started, or this
// process is one of them; counts.replicas is then that number or 0. Each
// replica has its own `restarts`. Returns ReplicasReport::exit_code() in the
// process that has started replicas.
int RunReplicas(int argc, char** argv, const ReplicaCounts& counts,
                const ReplicaMain& fn, const comm::ConnectOptions& options = {},
                const comm::RestartOptions& restarts = {});

}  // namespace fsdp::replicas

#endif  // REPLICAS_LAUNCHER_RUN_REPLICAS_H_
