// What each command is called, takes and says about itself.
#ifndef TOOLS_CHECKPOINT_COMMANDS_H_
#define TOOLS_CHECKPOINT_COMMANDS_H_

#include <vector>

#include "tools/checkpoint/text.h"

namespace fsdp::checkpoint::tool {

// In the order of --help.
const std::vector<CommandSpec>& Commands();

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_COMMANDS_H_
