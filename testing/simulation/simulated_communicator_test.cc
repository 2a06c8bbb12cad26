// The simulated network keeps the contract of communicators, whenever its bytes
// move.
#include <ATen/Parallel.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/testing/communicator_contract.h"
#include "gtest/gtest.h"
#include "testing/simulation/group.h"
#include "testing/simulation/network.h"
#include "testing/simulation/simulation.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::simulation::CreateSimulatedGroup;
using ::fsdp::simulation::Moves;
using ::fsdp::simulation::Network;
using ::fsdp::simulation::NetworkOptions;
using ::fsdp::simulation::Simulation;

// Lives as long as the test that runs.
struct World {
  Simulation simulation{Simulation::Options()};
  std::vector<std::unique_ptr<Network>> networks;
};

// Each rank has its own process; tasks of the test's call for it.
ContractBackend Backend(const std::string& name, NetworkOptions options) {
  const auto world = std::make_shared<std::unique_ptr<World>>();
  ContractBackend backend;
  backend.name = name;
  backend.begin = [world] {
    at::set_num_threads(1);
    *world = std::make_unique<World>();
    (*world)->simulation.Enter();
  };
  backend.end = [world] {
    (*world)->simulation.Leave();
    EXPECT_EQ((*world)->simulation.violation(), "");
    world->reset();
  };
  backend.create = [world, options](int world_size, absl::Duration timeout) {
    NetworkOptions own = options;
    own.timeout = timeout;
    (*world)->networks.push_back(
        std::make_unique<Network>((*world)->simulation, own));
    std::vector<int> processes(world_size);
    std::iota(processes.begin(), processes.end(), 0);
    return absl::StatusOr<Group>(
        CreateSimulatedGroup(*(*world)->networks.back(), processes));
  };
  return backend;
}

NetworkOptions Early() {
  NetworkOptions options;
  options.moves = Moves::kAtStart;
  options.has_common_memory = true;
  options.scales_itself = false;
  options.has_all_to_all = false;
  return options;
}

NetworkOptions Late() {
  NetworkOptions options;
  options.moves = Moves::kAtEnd;
  options.has_common_memory = true;
  options.late_visibility = true;
  options.overwrites_inputs = true;
  options.symmetric_is_collective = true;
  return options;
}

NetworkOptions Any() {
  NetworkOptions options;
  options.lost_per_mille = 50;
  options.scales_itself = false;
  options.overwrites_inputs = true;
  return options;
}

INSTANTIATE_TEST_SUITE_P(Simulated, CommunicatorContract,
                         ::testing::Values(Backend("early", Early()),
                                           Backend("late", Late()),
                                           Backend("any", Any())),
                         BackendName);

}  // namespace
}  // namespace fsdp::comm::testing
