#ifndef PLANNER_TOOL_UNIT_FILE_H_
#define PLANNER_TOOL_UNIT_FILE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "planner/simulator/model_shape.h"

// Models to simulate: a GPT by its sizes, and units from a text.

namespace fsdp::simulator {

// The model of testing/gpt: one unit per block, and the root.
struct GptShape {
  int64_t layers = 32;
  int64_t dim = 4096;
  int64_t vocab = 32000;
  int64_t seq = 2048;
  int64_t batch = 1;  // rows per rank and backward
  // Blocks keep only their inputs, and backward recomputes them.
  bool recompute = false;
};

// Counts matrix products, those of causal attention in full, and twice as much
// for backward. InvalidArgument: a number is below 1 (layers: below 0), or the
// units do not fit 64 bits.
absl::StatusOr<ModelShape> MakeGpt(const GptShape& gpt);

// Parses units from text, one per line, values separated by commas, the root
// first:
//
//   name,parent,elements,forward_ms,backward_ms
//   root,,1000,0.5,1
//   block0,root,7087872,3.1,6.4
//
// The first line names the columns, in any order: `name` and `elements`, and
// optionally `parent` (the name of an earlier unit; default: the first),
// `trainable` (0 or 1; default 1), `forward_flops`, `backward_flops`,
// `forward_ms` and `backward_ms` (default 0). Empty lines and those that begin
// with # are ignored. InvalidArgument names the line of `source`.
absl::StatusOr<ModelShape> ParseUnits(absl::string_view text,
                                      absl::string_view source);

}  // namespace fsdp::simulator

#endif  // PLANNER_TOOL_UNIT_FILE_H_
