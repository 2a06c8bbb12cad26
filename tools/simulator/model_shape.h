// The units of a model to simulate: what they own and how much they compute.
#ifndef TOOLS_SIMULATOR_MODEL_SHAPE_H_
#define TOOLS_SIMULATOR_MODEL_SHAPE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "flat_param/layout.h"
#include "tools/simulator/cost_model.h"

namespace fsdp::simulator {

struct UnitShape {
  std::string name;
  int parent = -1;  // index of the surrounding unit; -1 for the root, unit 0
  std::vector<flat_param::ParameterSpec> parameters;
  bool trainable = true;
  // Of the unit itself, without the units inside. In forward it comes after
  // them and in backward before, but for `share_before` of it.
  Work forward;
  Work backward;
  double share_before = 0;
};

struct ModelShape {
  std::vector<UnitShape> units;  // parents before children, the root first

  int64_t num_elements() const;
};

// A contiguous parameter of these sizes.
flat_param::ParameterSpec Parameter(std::string name,
                                    std::vector<int64_t> sizes);

// The model of examples/gpt, one unit per block and the root.
struct GptShape {
  int64_t layers = 32;
  int64_t dim = 4096;
  int64_t vocab = 32000;
  int64_t seq = 2048;
  int64_t batch = 1;  // rows per rank and backward
  // Blocks keep only their inputs and are computed again in backward.
  bool recompute = false;
};

// Counts the matrix products, those of causal attention in full, and twice as
// much for backward. InvalidArgument: a number below 1 (layers: below 0), or
// so large that the units do not fit 64 bits.
absl::StatusOr<ModelShape> MakeGpt(const GptShape& gpt);

// Units from text, one per line, values separated by commas, the root first:
//
//   name,parent,elements,forward_ms,backward_ms
//   root,,1000,0.5,1
//   block0,root,7087872,3.1,6.4
//
// The first line names the columns, in any order: `name` and `elements`, and
// where needed `parent` (the name of an earlier unit; default: the first),
// `trainable` (0 or 1; default 1), `forward_flops`, `backward_flops`,
// `forward_ms` and `backward_ms` (default 0). Lines that are empty or begin
// with # are left out. InvalidArgument names the line of `source`.
absl::StatusOr<ModelShape> ParseUnits(absl::string_view text,
                                      absl::string_view source);

}  // namespace fsdp::simulator

#endif  // TOOLS_SIMULATOR_MODEL_SHAPE_H_
