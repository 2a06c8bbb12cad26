// The command line of //planner/tool:simulate, and what it prints.
#ifndef PLANNER_TOOL_COMMAND_LINE_H_
#define PLANNER_TOOL_COMMAND_LINE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "planner/simulator/simulator.h"

namespace fsdp::simulator {

struct Settings {
  GptShape gpt;
  std::vector<int> ranks;
  Scenario scenario;  // without the model and the number of ranks
};

// Exits with a message for --help and for flags that absl cannot parse.
// InvalidArgument: a flag has an impossible value.
absl::StatusOr<Settings> ParseFlags(int argc, char** argv);

// Returns the times of each step and the bytes of a rank, a line per row.
std::string StepTable(const std::vector<StepResult>& rows);

}  // namespace fsdp::simulator

#endif  // PLANNER_TOOL_COMMAND_LINE_H_
