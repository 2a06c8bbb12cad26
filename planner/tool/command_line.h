// The command line of //planner/tool:simulate, and what it prints: tables for
// people, CSV for programs.
#ifndef PLANNER_TOOL_COMMAND_LINE_H_
#define PLANNER_TOOL_COMMAND_LINE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "planner/simulator/cost_model.h"
#include "planner/simulator/model_shape.h"
#include "planner/simulator/step_simulator.h"

namespace fsdp::simulator {

struct Settings {
  GptShape gpt;
  std::vector<int> ranks;
  Scenario scenario;  // without the model and the number of ranks
  bool per_unit = false;
  std::string csv;  // the file to write; empty: none
};

// Resolves relative paths as the user meant them, also under `bazel run`. Exits
// with a message for --help and for flags that absl cannot parse.
// InvalidArgument: a flag has an impossible value.
absl::StatusOr<Settings> ParseFlags(int argc, char** argv);

// Parses "8:3us:450,any:12us:400:300", one level each, the lowest first: the
// members, the latency, the GB/s of a member and, if different, those of
// reductions.
absl::StatusOr<std::vector<NetworkLevel>> ParseNetwork(absl::string_view text);

// Returns the times of each step and the bytes of a rank, a line per row.
std::string StepTable(const std::vector<StepResult>& rows);

// Returns a line per unit.
std::string UnitTable(const ModelShape& model, const StepResult& step);

// Returns the numbers of StepTable() in seconds and bytes, under a line of
// names.
std::string StepCsv(const std::vector<StepResult>& rows);

}  // namespace fsdp::simulator

#endif  // PLANNER_TOOL_COMMAND_LINE_H_
