// A process that simulates.
#ifndef TESTING_SIMULATION_PROCESS_H_
#define TESTING_SIMULATION_PROCESS_H_

namespace fsdp::simulation {

// Is called once, before all else. LibTorch then starts no threads of its own,
// which would run beside the tasks, and memory that threads leave stays with
// the process, since a seed starts tens of them.
void PrepareProcess();

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_PROCESS_H_
