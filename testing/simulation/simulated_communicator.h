// Ranks that are processes of a simulation.
#ifndef TESTING_SIMULATION_SIMULATED_COMMUNICATOR_H_
#define TESTING_SIMULATION_SIMULATED_COMMUNICATOR_H_

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "testing/simulation/group.h"

namespace fsdp::simulation {

// Creates the communicators of `processes`, by rank. `network` outlives them
// and the tensors that they give. Only CPU tensors are supported. Sums are made
// rank after rank. Any task of the simulation may call.
std::vector<std::unique_ptr<comm::Communicator>> CreateSimulatedGroup(
    Network& network, std::vector<int> processes);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_SIMULATED_COMMUNICATOR_H_
