// Reads from the environment which rank this process is, where the ranks meet,
// and how many cores it may use.
#ifndef COMM_STARTUP_ENVIRONMENT_H_
#define COMM_STARTUP_ENVIRONMENT_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fsdp::comm {

// The launchers whose variables ReadEnvironment() knows.
enum class StartedBy {
  kNobody,
  kTorchrun,
  kRanksFlag,  // comm/launcher/launcher.h
  kOpenMpi,
  kSlurm,
  kMpi,  // others than Open MPI
};

// Returns "a single process", "torchrun", "--ranks", "Open MPI", "Slurm" or
// "MPI".
absl::string_view Name(StartedBy started_by);

// Which rank this process is, of which job, and where the ranks meet.
struct Environment {
  int rank = 0;              // 0 <= rank < world_size
  int world_size = 1;        // ranks of the whole job
  int local_rank = 0;        // 0 <= local_rank < local_world_size
  int local_world_size = 1;  // ranks on this host

  // The address and port at which the ranks meet, usually those of rank 0. A
  // job of one rank may have none: empty and 0.
  std::string master_addr;
  int master_port = 0;

  // The launcher that has set the variables.
  StartedBy started_by = StartedBy::kNobody;

  // True where torchrun's agent serves the store in which the ranks meet, so
  // that rank 0 is a client, too. Keys begin with this prefix, which changes
  // with each restart and with the number of ranks.
  bool agent_store = false;
  std::string agent_store_prefix;

  // True where a keeper serves the store: a StoreServer (comm/meeting) of a
  // process that outlives the ranks. Rank 0 is a client, too, nobody listens,
  // and nobody waits for goodbyes. Keys begin with this prefix, which is not
  // empty and which no other group has used: what a group leaves stays there
  // until somebody deletes it (JobStore::DeleteAll()). No variable sets this.
  // It takes precedence over agent_store.
  bool kept_store = false;
  std::string kept_store_prefix;

  // Only the ranks of this job know the secret, and recognise each other by it.
  // If it is empty, whoever reaches the place is taken for a rank.
  std::string secret;

  // A socket that listens there already and that rank 0 takes over. -1: rank 0
  // opens one.
  int listen_fd = -1;

  // The numbers of restarts that torchrun or --ranks has made, and may make. 0
  // with other launchers.
  int restart_count = 0;
  int max_restarts = 0;

  // The replica that these ranks are, in a job with replicas that outlive each
  // other. All fields above are those of one replica. 0 replicas: the job has
  // none.
  int replica = 0;  // 0 <= replica < replicas
  int replicas = 0;
  // The number of this start of the replica, from 1.
  int replica_incarnation = 0;
  // The place of the keeper of all replicas.
  std::string keeper_addr;
  int keeper_port = 0;

  // The network interface between hosts ("eth0"). Empty: the one that leads to
  // master_addr.
  std::string interface;

  // The folder for what ranks were doing when a job hangs or fails. Empty:
  // standard error.
  std::string inspection_folder;
};

// Returns the value of an environment variable, or null. std::getenv fits.
using GetEnvironmentVariable = absl::FunctionRef<const char*(const char* name)>;

// Reads the variables of the launcher that has started this process, the first
// of these whose rank is set (of MPI before Slurm if MPI_LOCALRANKID is set):
//   torchrun  RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; LOCAL_RANK and
//             LOCAL_WORLD_SIZE, which default to one rank per host;
//             TORCHELASTIC_USE_AGENT_STORE, TORCHELASTIC_RESTART_COUNT,
//             TORCHELASTIC_MAX_RESTARTS. --ranks sets the same.
//   Open MPI  OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}; MASTER_ADDR
//             and MASTER_PORT, unless all ranks are on one host
//   Slurm     SLURM_PROCID in a step of srun, not in the shell of a job;
//             SLURM_LOCALID; SLURM_STEP_NUM_TASKS or
//             SLURM_NTASKS; SLURM_[STEP_]TASKS_PER_NODE and SLURM_NODEID or
//             SLURM_NTASKS_PER_NODE. Rank 0 is on the first host of
//             SLURM_STEP_NODELIST or SLURM_JOB_NODELIST and its port follows
//             from SLURM_JOB_ID and SLURM_STEP_ID; MASTER_ADDR and MASTER_PORT
//             override these.
//   MPI       PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS, as MPICH,
//             Intel MPI and MVAPICH set them; MASTER_ADDR and MASTER_PORT
// It also reads FSDP_JOB_SECRET, GLOO_SOCKET_IFNAME and FSDP_INSPECT_DIR. A
// replica has all of FSDP_REPLICA, FSDP_REPLICAS, FSDP_REPLICA_STORE
// ("host:port", "[::1]:port") and FSDP_REPLICA_INCARNATION, to which torchrun's
// TORCHELASTIC_RESTART_COUNT is added, since all its attempts have the same
// variables. An empty variable counts as one that is not set. With none set,
// this process is the only rank. InvalidArgument names the variable, its value
// and what is expected.
absl::StatusOr<Environment> ReadEnvironment(GetEnvironmentVariable get);

// Splits "node1:29500" or "[::1]:29500". Returns false if `place` is neither.
bool SplitPlace(absl::string_view place, std::string* host, int* port);

// Returns the first host of a Slurm node list: "node003" for
// "node[003-010,12]".
absl::StatusOr<std::string> FirstSlurmHost(const std::string& node_list);

// Returns how many cores this process may use, at least 1: those that it may
// run on (its affinity, as taskset and Slurm set it), or fewer where its
// control groups have a quota of time, as by a container's --cpus; a fraction
// is rounded up. /proc and /sys are looked for under `root`.
int UsableCores(const std::string& root = "");

// Returns the number of compute threads of each of `ranks_on_host` ranks:
// OMP_NUM_THREADS if that is a positive number, else UsableCores() divided by
// the ranks, at least 1.
int ThreadsPerRank(int ranks_on_host);

}  // namespace fsdp::comm

#endif  // COMM_STARTUP_ENVIRONMENT_H_
