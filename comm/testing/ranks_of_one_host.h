// Ranks of this host that have to meet, as environments and as threads, and a
// test that they have met. (Those of run_ranks_test.cc are processes.)
#ifndef COMM_TESTING_RANKS_OF_ONE_HOST_H_
#define COMM_TESTING_RANKS_OF_ONE_HOST_H_

#include <c10/core/Device.h>

#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "comm/bootstrap/bootstrap.h"
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

inline constexpr absl::Duration kLimit = absl::Seconds(30);

ConnectOptions Options(absl::Duration connect_timeout = kLimit);

// Runs fn(i) on each thread i and returns the results.
std::vector<absl::Status> RunInThreads(
    int num_threads, const std::function<absl::Status(int)>& fn);

// Connects all ranks, adds their numbers up and returns their results.
std::vector<absl::Status> ConnectAll(const std::vector<Environment>& ranks,
                                     const ConnectOptions& options);

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_RANKS_OF_ONE_HOST_H_
