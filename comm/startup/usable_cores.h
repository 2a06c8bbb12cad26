// How many cores of this host a process may compute on, and how its ranks share
// them.
#ifndef COMM_STARTUP_USABLE_CORES_H_
#define COMM_STARTUP_USABLE_CORES_H_

#include <string>

namespace fsdp::comm {

// The cores that the process may run on (its affinity, as taskset and Slurm set
// it), or fewer where its control groups have a quota of time, as a container's
// --cpus: rounded up, 1 at least. `root`: where /proc and /sys are.
int UsableCores(const std::string& root = "");

// Compute threads of each of so many ranks of this host: OMP_NUM_THREADS where
// it is set to a number, else UsableCores() divided among them, 1 at least.
int ThreadsPerRank(int ranks_on_host);

}  // namespace fsdp::comm

#endif  // COMM_STARTUP_USABLE_CORES_H_
