// Connects communicators whose ranks have to connect at the same time.
#ifndef COMM_TESTING_CONNECT_RANKS_H_
#define COMM_TESTING_CONNECT_RANKS_H_

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "comm/communicator.h"

namespace fsdp::comm::testing {

using Group = std::vector<std::unique_ptr<Communicator>>;  // by rank

// Calls `connect` for each rank, on a thread of its own. Returns the results by
// rank, or the error of the lowest rank that has failed.
absl::StatusOr<Group> ConnectRanks(
    int world_size,
    const std::function<CreatedCommunicator(int rank)>& connect);

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_CONNECT_RANKS_H_
