// Programs whose ranks are processes.
#ifndef FSDP_TESTING_PROGRAM_PROGRAM_PROCESSES_H_
#define FSDP_TESTING_PROGRAM_PROGRAM_PROCESSES_H_

#include <string>
#include <vector>

#include "fsdp/testing/program/program.h"
#include "fsdp/testing/program/program_outcome.h"

namespace fsdp::testing {

// Starts this executable once per rank with --batch_of_rank=FILE. Returns the
// end of the first rank that failed. The programs must have equally many ranks;
// refused ones are passed over. Must be called before LibTorch is used, in a
// process with one thread.
BatchEnd RunInProcesses(const std::vector<Program>& programs,
                        const std::string& scratch);

// Runs such a process and returns its exit code.
int RunRankOfBatch(const std::string& file);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PROGRAM_PROGRAM_PROCESSES_H_
