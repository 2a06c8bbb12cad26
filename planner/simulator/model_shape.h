// The units of a model to simulate: their parameters and their compute.
#ifndef PLANNER_SIMULATOR_MODEL_SHAPE_H_
#define PLANNER_SIMULATOR_MODEL_SHAPE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "flat_param/layout.h"
#include "fsdp/memory/memory_plan.h"
#include "fsdp/schedule/schedule.h"
#include "planner/simulator/cost_model.h"

namespace fsdp::simulator {

// The compute of a unit itself, without the units inside. In forward it comes
// after them and in backward before, except for the part `share_before`.
struct UnitWork {
  Work forward;
  Work backward;
  double share_before = 0;
};

struct UnitShape : UnitWork {
  std::string name;
  int parent = -1;  // index of the surrounding unit; -1 for the root, unit 0
  std::vector<flat_param::ParameterSpec> parameters;
};

struct ModelShape {
  std::vector<UnitShape> units;  // parents before children, the root first

  int64_t num_elements() const;
};

// Returns a contiguous parameter of these sizes.
flat_param::ParameterSpec Parameter(std::string name,
                                    std::vector<int64_t> sizes);

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

// Shards a model's units over a number of ranks: what the schedule and the
// memory plan need to know of them, and the sizes of their collectives. The
// arithmetic is the library's, padding included, without tensors.

// ShardingStrategy of fsdp/options/options.h. Hybrid strategies have fewer
// `shard_ranks` than ranks.
enum class Strategy {
  kFull,        // whole while a unit computes
  kGradients,   // whole from forward to backward
  kOptimizer,   // whole until a backward synchronizes
  kReplicated,  // always whole
};

struct ShardingOptions {
  int ranks = 1;
  int shard_ranks = 0;  // ranks that share one copy; 0: all
  Strategy strategy = Strategy::kFull;
  bool reshard_root = false;    // with kFull, the root too
  int backward_group_size = 0;  // UnitOptions::backward_group_size
  // Bytes per element of parameters at rest, gathered, and reduced.
  int stored_bytes = 4;
  int compute_bytes = 4;
  int reduce_bytes = 4;
};

// Bytes of a unit's collectives, over all ranks of the group.
struct UnitMessages {
  int64_t gather = 0;
  int64_t reduce = 0;   // the segments of all ranks
  int64_t segment = 0;  // of one rank: all-reduced over copies
  // Bytes of gradients, in the dtype they are computed in, without padding.
  int64_t gradients = 0;
};

struct ShardedShape {
  ShardingOptions options;
  Group shard;      // consecutive ranks
  Group replicate;  // size 1: there is one copy
  Group part;       // gathers for backward; size 0: the shard group does
  // One entry per unit of the model.
  std::vector<ScheduledUnit> units;
  std::vector<UnitBytes> bytes;
  std::vector<UnitMessages> messages;
  std::vector<UnitWork> work;

  bool casts() const { return options.stored_bytes != options.compute_bytes; }
};

// InvalidArgument: there are no ranks; shard_ranks or backward_group_size do
// not divide; an element size is not 1, 2, 4 or 8; options contradict each
// other; or FlatLayout refuses a unit.
absl::StatusOr<ShardedShape> Shard(const ModelShape& model,
                                   const ShardingOptions& options);

}  // namespace fsdp::simulator

#endif  // PLANNER_SIMULATOR_MODEL_SHAPE_H_
