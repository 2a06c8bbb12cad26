// Environments of ranks that have to meet, and a test that they have met.
#ifndef COMM_TESTING_RANKS_OF_ONE_HOST_H_
#define COMM_TESTING_RANKS_OF_ONE_HOST_H_

#include <c10/core/Device.h>

#include <vector>

#include "absl/status/status.h"
#include "comm/communicator.h"
#include "comm/startup/environment.h"

namespace fsdp::comm::testing {

// Returns the environments of `world_size` ranks on this host, with a free
// port.
std::vector<Environment> RanksOfOneHost(int world_size);

// Sums the ranks' numbers in a tensor on `device`. Returns an error if the sum
// is wrong or takes longer than 30 seconds.
absl::Status SumRanks(Communicator& communicator,
                      c10::Device device = c10::Device(c10::kCPU));

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_RANKS_OF_ONE_HOST_H_
