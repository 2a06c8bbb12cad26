// Runs the program of a test as a process of its own: a shell starts it again
// in a role that an environment variable names.
#ifndef BASE_TESTING_THIS_PROGRAM_H_
#define BASE_TESTING_THIS_PROGRAM_H_

#include <string>

#include "absl/strings/string_view.h"

namespace fsdp::testing {

struct ProgramOutcome {
  int code = -1;       // -1 if a signal has ended it
  std::string output;  // both streams
};

// Returns the path of this process's program.
std::string ProgramPath();

// Waits for the end of `command`. Stops the program if no process can be
// started.
ProgramOutcome RunCommand(absl::string_view command);

// Runs this program without arguments. `variables` are as a shell takes them:
// "A=b C=d".
ProgramOutcome RunThisProgram(absl::string_view variables);

}  // namespace fsdp::testing

#endif  // BASE_TESTING_THIS_PROGRAM_H_
