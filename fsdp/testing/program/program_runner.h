// Runs programs sharded and plain, in this process.
#ifndef FSDP_TESTING_PROGRAM_PROGRAM_RUNNER_H_
#define FSDP_TESTING_PROGRAM_PROGRAM_RUNNER_H_

#include <string>

#include "fsdp/testing/program/program.h"
#include "fsdp/testing/program/program_fuzzer.h"

namespace fsdp::testing {

// Runs ranks as threads, in the program's own group. `scratch` must be an
// existing directory.
ProgramOutcome RunProgram(const Program& program, const std::string& scratch);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PROGRAM_PROGRAM_RUNNER_H_
