// Ranks that have to meet, and whether they have.
#ifndef COMM_TESTING_RANKS_OF_ONE_HOST_H_
#define COMM_TESTING_RANKS_OF_ONE_HOST_H_

#include <c10/core/Device.h>

#include <vector>

#include "absl/status/status.h"
#include "comm/communicator.h"
#include "comm/startup/environment.h"

namespace fsdp::comm::testing {

// The environments of `world_size` ranks on this host, with a free port.
std::vector<Environment> RanksOfOneHost(int world_size);

// An error unless the ranks of tensors on `device` add up within 30 seconds.
absl::Status SumRanks(Communicator& communicator,
                      c10::Device device = c10::Device(c10::kCPU));

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_RANKS_OF_ONE_HOST_H_
