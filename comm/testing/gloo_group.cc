#include "comm/testing/gloo_group.h"

#include <memory>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "comm/gloo/gloo_communicator.h"

namespace fsdp::comm::testing {

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateGlooGroup(
    int world_size, absl::Duration timeout) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  GlooOptions options;
  options.timeout = timeout;
  options.hostname = "127.0.0.1";
  std::vector<absl::StatusOr<std::unique_ptr<Communicator>>> results(
      world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      results[rank] = CreateGlooCommunicator(store, rank, world_size, options);
    });
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
