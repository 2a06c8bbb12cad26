// Programs whose ranks are processes.
#ifndef FSDP_TESTING_PROGRAM_PROGRAM_PROCESSES_H_
#define FSDP_TESTING_PROGRAM_PROGRAM_PROCESSES_H_

#include <string>
#include <vector>

#include "fsdp/testing/program/program.h"
#include "fsdp/testing/program/program_outcome.h"

namespace fsdp::testing {

// Starts this same program once per rank with --batch_of_rank=FILE, and returns
// where the first rank that failed has ended. The programs have equally many
// ranks. Refused ones are passed over. To be called before LibTorch is used, by
// a process of one thread.
BatchEnd RunInProcesses(const std::vector<Program>& programs,
                        const std::string& scratch);

// What such a process does: its exit code.
int RunRankOfBatch(const std::string& file);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PROGRAM_PROGRAM_PROCESSES_H_
