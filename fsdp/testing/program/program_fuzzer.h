// Draws programs from successive seeds, runs them, and makes those that fail
// smaller.
#ifndef FSDP_TESTING_PROGRAM_PROGRAM_FUZZER_H_
#define FSDP_TESTING_PROGRAM_PROGRAM_FUZZER_H_

#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "fsdp/testing/program/program.h"

namespace fsdp::testing {

struct ProgramOutcome {
  enum Kind {
    kSame,     // as plain LibTorch
    kRefused,  // FullyShard() does not take it, on all ranks alike
    kDiffers,  // other numbers
    kFails,    // an error where plain LibTorch has none
  };

  Kind kind = kSame;
  std::string text;

  bool is_failure() const { return kind == kDiffers || kind == kFails; }
};

// Returns the outcome for a status of RunShardedProgram().
ProgramOutcome OutcomeOf(const absl::Status& status);

// Returns whether a program fails in the way that matters.
using ProgramFails = absl::FunctionRef<bool(const Program&)>;

// Sets one field after the other to its plain value, or closer to it, as long
// as the program still fails. Asks at most `max_runs` times.
Program Shrink(Program program, ProgramFails fails, int max_runs);

struct FuzzOptions {
  uint32_t begin = 0;
  uint32_t end = 100;
  absl::Duration limit = absl::InfiniteDuration();
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

using ProgramRun = std::function<ProgramOutcome(const Program&)>;
FuzzReport Fuzz(const FuzzOptions& options, const ProgramRun& run);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PROGRAM_PROGRAM_FUZZER_H_
