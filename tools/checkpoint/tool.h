// The program, which runs commands by name.
#ifndef TOOLS_CHECKPOINT_TOOL_H_
#define TOOLS_CHECKPOINT_TOOL_H_

#include <ostream>
#include <string>
#include <vector>

#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint::tool {

struct Console {
  std::ostream& out;
  std::ostream& err;
  bool progress = false;  // on `err`
};

// The exit codes of the program.
inline constexpr int kFine = 0;
inline constexpr int kFound = 1;  // verify: problems
inline constexpr int kFailed = 2;

// Runs the command of `words`, the arguments behind the program's name, and
// returns the exit code.
int RunTool(FileSystem& files, const std::vector<std::string>& words,
            Console console);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_TOOL_H_
