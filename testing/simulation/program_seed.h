// Runs the programs of //fsdp/testing/program in a simulation.
#ifndef TESTING_SIMULATION_PROGRAM_SEED_H_
#define TESTING_SIMULATION_PROGRAM_SEED_H_

#include <cstdint>

#include "testing/simulation/seed_run.h"

namespace fsdp::simulation {

// Runs the program of `seed`, which calls the library between steps for
// whatever it offers, on the seed's network, without tiers and faults. A
// problem is a broken contract, an error, or other numbers than plain
// LibTorch's.
SeedResult RunProgramSeed(uint64_t seed, const SeedOptions& options);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_PROGRAM_SEED_H_
