// The program: its commands by their names.
#ifndef TOOLS_CHECKPOINT_TOOL_H_
#define TOOLS_CHECKPOINT_TOOL_H_

#include <ostream>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint::tool {

struct Console {
  std::ostream& out;
  std::ostream& err;  // errors, and how far it is
  bool progress = false;
};

// How the program ends.
inline constexpr int kFine = 0;
inline constexpr int kFound = 1;  // verify: problems; diff: differences
inline constexpr int kFailed = 2;

// `words` are the arguments behind the program's name.
int RunTool(FileSystem& files, const std::vector<std::string>& words,
            Console console);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_TOOL_H_
