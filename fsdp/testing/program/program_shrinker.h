// Makes a program that fails smaller.
#ifndef FSDP_TESTING_PROGRAM_PROGRAM_SHRINKER_H_
#define FSDP_TESTING_PROGRAM_PROGRAM_SHRINKER_H_

#include "absl/functional/function_ref.h"
#include "fsdp/testing/program/program.h"

namespace fsdp::testing {

// Returns whether a program fails in the way that matters.
using ProgramFails = absl::FunctionRef<bool(const Program&)>;

// Sets one field after the other to its plain value, or closer to it, as long
// as the program still fails. Asks at most `max_runs` times.
Program Shrink(Program program, ProgramFails fails, int max_runs);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PROGRAM_PROGRAM_SHRINKER_H_
