// The program of a test as a process of its own: started again by a shell, in
// a role that a variable of its environment says.
#ifndef BASE_TESTING_THIS_PROGRAM_H_
#define BASE_TESTING_THIS_PROGRAM_H_

#include <string>

#include "absl/strings/string_view.h"

namespace fsdp::testing {

struct ProgramOutcome {
  int code = -1;       // as it is where a signal has ended it
  std::string output;  // both streams
};

// Of this process.
std::string ProgramPath();

// Waits for its end. Stops the program where no process can be started.
ProgramOutcome RunCommand(absl::string_view command);

// This program without arguments. `variables` as a shell takes them: "A=b C=d".
ProgramOutcome RunThisProgram(absl::string_view variables);

}  // namespace fsdp::testing

#endif  // BASE_TESTING_THIS_PROGRAM_H_
