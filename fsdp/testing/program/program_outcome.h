// The outcome of a program.
#ifndef FSDP_TESTING_PROGRAM_PROGRAM_OUTCOME_H_
#define FSDP_TESTING_PROGRAM_PROGRAM_OUTCOME_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"

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

// The end of a run of several programs: the first that is not kSame, or the
// position behind the last.
struct BatchEnd {
  size_t index = 0;
  ProgramOutcome outcome;
};

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PROGRAM_PROGRAM_OUTCOME_H_
