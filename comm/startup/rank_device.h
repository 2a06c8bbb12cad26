// Chooses the device of a host on which a rank computes, and its CPU threads.
#ifndef COMM_STARTUP_RANK_DEVICE_H_
#define COMM_STARTUP_RANK_DEVICE_H_

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <string>

#include "absl/status/statusor.h"

namespace fsdp::comm {

// Returns the device of a host's rank r: device r modulo the number of those
// that this process sees. FailedPrecondition says that there is none, or that
// LibTorch's part for them is not linked.
absl::StatusOr<c10::Device> DeviceOfRank(c10::DeviceType type, int local_rank);

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

#endif  // COMM_STARTUP_RANK_DEVICE_H_
