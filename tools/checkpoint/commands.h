// The names, arguments and help texts of the commands.
#ifndef TOOLS_CHECKPOINT_COMMANDS_H_
#define TOOLS_CHECKPOINT_COMMANDS_H_

#include <vector>

#include "tools/checkpoint/text.h"

namespace fsdp::checkpoint::tool {

// Returns them in the order of --help.
const std::vector<CommandSpec>& Commands();

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_COMMANDS_H_
