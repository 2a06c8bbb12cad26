// The command line of //planner/tool:simulate.
#ifndef PLANNER_TOOL_FLAGS_H_
#define PLANNER_TOOL_FLAGS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "planner/simulator/cost_model.h"
#include "planner/simulator/model_shape.h"
#include "planner/simulator/scenario.h"
#include "planner/tool/unit_file.h"

namespace fsdp::simulator {

struct Settings {
  GptShape gpt;
  std::string units;  // a file to read instead
  std::vector<int> ranks;
  Scenario scenario;  // without a model and a number of ranks
  bool per_unit = false;
  std::string csv;  // the file to write; empty: none
};

// Relative paths become those the user meant, also under `bazel run`. Exits
// with a message for --help and for flags that absl cannot parse.
// InvalidArgument for all else that is no setting.
absl::StatusOr<Settings> ParseFlags(int argc, char** argv);

// "8:3us:450,any:12us:400:300": a level each, the lowest first; its members,
// latency, GB/s of one member and, where they differ, those of reductions.
absl::StatusOr<std::vector<NetworkLevel>> ParseNetwork(absl::string_view text);

}  // namespace fsdp::simulator

#endif  // PLANNER_TOOL_FLAGS_H_
