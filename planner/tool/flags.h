// The command line of //planner/tool:simulate.
#ifndef PLANNER_TOOL_FLAGS_H_
#define PLANNER_TOOL_FLAGS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "planner/simulator/cost_model.h"
#include "planner/simulator/model_shape.h"
#include "planner/simulator/step_simulator.h"
#include "planner/tool/unit_file.h"

namespace fsdp::simulator {

struct Settings {
  GptShape gpt;
  std::string units;  // a file of units to read instead of `gpt`
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

}  // namespace fsdp::simulator

#endif  // PLANNER_TOOL_FLAGS_H_
