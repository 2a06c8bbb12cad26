// Draws programs from successive seeds, runs them, and shrinks those that fail.
#ifndef FSDP_TESTING_PROGRAM_PROGRAM_FUZZER_H_
#define FSDP_TESTING_PROGRAM_PROGRAM_FUZZER_H_

#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "fsdp/testing/program/program.h"
#include "fsdp/testing/program/program_outcome.h"

namespace fsdp::testing {

struct FuzzOptions {
  uint32_t begin = 0;
  uint32_t end = 100;
  absl::Duration limit = absl::InfiniteDuration();
  int batch = 1;  // programs for one call
  int max_failures = 10;
  int max_shrinks = 120;  // runs for each failure; 0 for none
  DrawOptions draw;
  bool verbose = false;     // prints programs before they run
  std::FILE* out = stderr;  // not owned
};

struct FuzzFailure {
  uint32_t seed;
  Program program;  // as small as it gets
  ProgramOutcome outcome;
};

struct FuzzReport {
  int seeds = 0;
  int refused = 0;
  std::map<std::string, int> refusals;  // by the beginning of the text
  std::vector<FuzzFailure> failures;
};

// Runs programs, one after the other, until one differs from plain LibTorch.
using BatchRun = std::function<BatchEnd(const std::vector<Program>&)>;
FuzzReport Fuzz(const FuzzOptions& options, const BatchRun& run);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PROGRAM_PROGRAM_FUZZER_H_
