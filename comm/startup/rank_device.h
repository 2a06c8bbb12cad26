// Which device of a host a rank computes on.
#ifndef COMM_STARTUP_RANK_DEVICE_H_
#define COMM_STARTUP_RANK_DEVICE_H_

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include "absl/status/statusor.h"

namespace fsdp::comm {

// How many devices of that type this process sees, one at least; the CPU is
// one. FailedPrecondition: none, or LibTorch's part for them is not linked.
absl::StatusOr<int> CountDevices(c10::DeviceType type);

// Rank r of a host takes device r modulo their number.
absl::StatusOr<c10::Device> DeviceOfRank(c10::DeviceType type, int local_rank);

}  // namespace fsdp::comm

#endif  // COMM_STARTUP_RANK_DEVICE_H_
