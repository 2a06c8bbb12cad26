// What the environment says about this process: which rank it is and where the
// ranks meet.
#ifndef COMM_STARTUP_ENVIRONMENT_H_
#define COMM_STARTUP_ENVIRONMENT_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fsdp::comm {

enum class StartedBy {
  kNobody,
  kTorchrun,
  kRanksFlag,  // comm/launcher/launcher.h
  kOpenMpi,
  kSlurm,
};

// For messages: "a single process", "torchrun", "--ranks", "Open MPI", "Slurm".
absl::string_view Name(StartedBy started_by);

struct Environment {
  int rank = 0;              // 0 <= rank < world_size
  int world_size = 1;        // ranks of the whole job
  int local_rank = 0;        // 0 <= local_rank < local_world_size
  int local_world_size = 1;  // ranks on this host

  // Where rank 0 can be reached; empty and 0 where a job of one rank names no
  // place.
  std::string master_addr;
  int master_port = 0;

  // Who set the variables.
  StartedBy started_by = StartedBy::kNobody;

  // The place is served by the launcher's own store (torchrun's agent), so
  // that rank 0 is a client as well; keys begin with this prefix, which is
  // another one after each restart and with another number of ranks.
  bool agent_store = false;
  std::string agent_store_prefix;

  // The place is served by a keeper, a StoreServer (comm/meeting) of a process
  // that outlives the ranks: rank 0 is a client as well, nobody listens, and
  // nobody waits for goodbyes. Keys begin with this prefix, which is not empty
  // and which no other group has had before: what a group leaves stays there
  // until somebody deletes it (JobStore::DeleteAll()). Comes before
  // agent_store. No variable sets it.
  bool kept_store = false;
  std::string kept_store_prefix;

  // What only the ranks of this job know, by which they know each other; empty:
  // whoever can reach the place is taken for a rank.
  std::string secret;

  // A socket that already listens at the place and that rank 0 takes over; -1
  // where it has to open one.
  int listen_fd = -1;

  // How often the job has been restarted, and may be: of torchrun and --ranks;
  // of others 0.
  int restart_count = 0;
  int max_restarts = 0;

  // Which replica these ranks are, where a job has several that outlive each
  // other. Each is a job of its own in all that stands above; 0 replicas: there
  // are none.
  int replica = 0;  // 0 <= replica < replicas
  int replicas = 0;
  // How often it has been started, this time included: from 1.
  int replica_incarnation = 0;
  // Where the keeper of all replicas can be reached.
  std::string keeper_addr;
  int keeper_port = 0;

  // The network interface to use between hosts ("eth0"); empty: the one that
  // leads to master_addr.
  std::string interface;

  // Where ranks write what they were doing when a job hangs or fails; empty: on
  // standard error.
  std::string inspection_folder;
};

// The value of an environment variable, or null; std::getenv fits.
using GetEnvironmentVariable = absl::FunctionRef<const char*(const char* name)>;

// Reads the variables of the first of these that has started this process:
//   torchrun  RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; LOCAL_RANK and
//             LOCAL_WORLD_SIZE, which default to one rank per host;
//             TORCHELASTIC_USE_AGENT_STORE, TORCHELASTIC_RESTART_COUNT,
//             TORCHELASTIC_MAX_RESTARTS. --ranks sets the same.
//   Open MPI  OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}; MASTER_ADDR
//             and MASTER_PORT, unless all ranks are on one host
//   Slurm     SLURM_PROCID, SLURM_LOCALID; SLURM_STEP_NUM_TASKS or
//             SLURM_NTASKS; SLURM_[STEP_]TASKS_PER_NODE and SLURM_NODEID or
//             SLURM_NTASKS_PER_NODE. Rank 0 is on the first host of
//             SLURM_STEP_NODELIST or SLURM_JOB_NODELIST and its port follows
//             from SLURM_JOB_ID and SLURM_STEP_ID; MASTER_ADDR and MASTER_PORT
//             come before both.
// and FSDP_JOB_SECRET, GLOO_SOCKET_IFNAME, FSDP_INSPECT_DIR; of replicas all of
// FSDP_REPLICA, FSDP_REPLICAS, FSDP_REPLICA_INCARNATION, to which torchrun's
// TORCHELASTIC_RESTART_COUNT is added since each of its attempts has the same
// variables, and FSDP_REPLICA_STORE ("host:port", "[::1]:port"). An empty
// variable is one that is not set. Nothing set: one rank. InvalidArgument names
// the variable, its value and what is expected.
absl::StatusOr<Environment> ReadEnvironment(GetEnvironmentVariable get);

// The first host of a Slurm node list: "node003" for "node[003-010,12]".
absl::StatusOr<std::string> FirstSlurmHost(const std::string& node_list);

}  // namespace fsdp::comm

#endif  // COMM_STARTUP_ENVIRONMENT_H_
