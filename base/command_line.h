// Reads the flags of a program.
#ifndef BASE_COMMAND_LINE_H_
#define BASE_COMMAND_LINE_H_

#include <vector>

#include "absl/strings/string_view.h"

namespace fsdp {

// Sets the flags of ABSL_FLAG, and returns the other words, the program's name
// first. A flag that cannot be read exits with 1, also beside --help. --help
// prints `usage` and the flags of the source files whose paths end with `file`,
// and exits with 0, as do -help, --helpfull and Abseil's others.
// Later calls keep the first one's `usage`.
std::vector<char*> ParseCommandLine(int argc, char** argv,
                                    absl::string_view usage,
                                    absl::string_view file);

}  // namespace fsdp

#endif  // BASE_COMMAND_LINE_H_
