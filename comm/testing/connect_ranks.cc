#include "comm/testing/connect_ranks.h"

#include <thread>
#include <utility>

#include "base/status_macros.h"

namespace fsdp::comm::testing {

absl::StatusOr<Group> ConnectRanks(
    int world_size,
    const std::function<CreatedCommunicator(int rank)>& connect) {
  std::vector<CreatedCommunicator> results(world_size);
  std::vector<std::thread> threads;
  threads.reserve(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] { results[rank] = connect(rank); });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<std::unique_ptr<Communicator>> group;
  for (auto& result : results) {
    FSDP_ASSIGN_OR_RETURN(auto communicator, std::move(result));
    group.push_back(std::move(communicator));
  }
  return group;
}

}  // namespace fsdp::comm::testing
