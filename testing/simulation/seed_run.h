// Runs a scenario and judges how it has ended.
#ifndef TESTING_SIMULATION_SEED_RUN_H_
#define TESTING_SIMULATION_SEED_RUN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "testing/simulation/mutant.h"
#include "testing/simulation/scenario.h"

namespace fsdp::simulation {

// Is called once, before all else. LibTorch then starts no threads of its own,
// which would run beside the tasks, and memory that threads leave stays with
// the process, since a seed starts tens of them.
void PrepareProcess();

struct SeedOptions {
  Mutant mutant = Mutant::kNone;
  bool keep_log = false;
};

struct SeedResult {
  std::string problem;  // empty: none
  // The scenario's, and what has happened: "killed", "restarted".
  std::vector<std::string> features;
  uint64_t log_hash = 0;
  std::vector<std::string> log;
  int64_t events = 0;
};

// Problems are a broken contract of a communicator; other bits than plain
// LibTorch's; an error that no fault explains; a rank that after a fault
// neither ends well nor returns in time an error that says what has happened;
// and a checkpoint that was said to be saved and cannot be loaded.
SeedResult RunSeed(const Scenario& scenario, const SeedOptions& options);

// Runs the program of //fsdp/testing/program of `seed`, which calls the library
// between steps for whatever it offers, on the seed's network, without tiers
// and faults. A problem is a broken contract, an error, or other numbers than
// plain LibTorch's.
SeedResult RunProgramSeed(uint64_t seed, const SeedOptions& options);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_SEED_RUN_H_
