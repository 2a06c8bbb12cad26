// Which device of a host a rank computes on.
#ifndef COMM_STARTUP_RANK_DEVICE_H_
#define COMM_STARTUP_RANK_DEVICE_H_

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <string>

#include "absl/status/statusor.h"

namespace fsdp::comm {

// How many devices of that type this process sees, one at least; the CPU is
// one. FailedPrecondition: none, or LibTorch's part for them is not linked.
absl::StatusOr<int> CountDevices(c10::DeviceType type);

// Rank r of a host takes device r modulo their number.
absl::StatusOr<c10::Device> DeviceOfRank(c10::DeviceType type, int local_rank);

// How many cores of this host a process may compute on, and how its ranks share
// them.

// The cores that the process may run on (its affinity, as taskset and Slurm set
// it), or fewer where its control groups have a quota of time, as a container's
// --cpus: rounded up, 1 at least. `root`: where /proc and /sys are.
int UsableCores(const std::string& root = "");

// Compute threads of each of so many ranks of this host: OMP_NUM_THREADS where
// it is set to a number, else UsableCores() divided among them, 1 at least.
int ThreadsPerRank(int ranks_on_host);

}  // namespace fsdp::comm

#endif  // COMM_STARTUP_RANK_DEVICE_H_
