// A model's units on a number of ranks: what the schedule and the memory plan
// are told of them, and the sizes of their collectives. The arithmetic is the
// library's, padding included, without its tensors.
#ifndef PLANNER_SIMULATOR_SHARDING_H_
#define PLANNER_SIMULATOR_SHARDING_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "fsdp/describe/memory_plan.h"
#include "fsdp/schedule/schedule.h"
#include "planner/simulator/cost_model.h"
#include "planner/simulator/model_shape.h"

namespace fsdp::simulator {

// ShardingStrategy of fsdp/options/options.h; hybrid with fewer `shard_ranks`
// than ranks.
enum class Strategy {
  kFull,        // whole while a unit computes
  kGradients,   // whole from forward to backward
  kOptimizer,   // whole until a backward synchronises
  kReplicated,  // always whole
};

struct ShardingOptions {
  int ranks = 1;
  int shard_ranks = 0;  // that hold one copy together; 0: all
  Strategy strategy = Strategy::kFull;
  bool reshard_root = false;    // with kFull, the root too
  int backward_group_size = 0;  // UnitOptions::backward_group_size
  // Bytes per element: of resting parameters, while gathered, while reduced.
  int stored_bytes = 4;
  int compute_bytes = 4;
  int reduce_bytes = 4;
};

// Bytes of a unit's collectives, of all ranks of the group together.
struct UnitMessages {
  int64_t gather = 0;
  int64_t reduce = 0;   // the segments of all ranks
  int64_t segment = 0;  // of one rank: what is all-reduced over replicas
  // Of gradients, in the dtype they are computed in, without padding.
  int64_t gradients = 0;
};

struct ShardedShape {
  ShardingOptions options;
  Group shard;      // consecutive ranks
  Group replicate;  // of size 1: nothing is replicated
  Group part;       // that gathers for backward; of size 0: the shard group
  // One entry per unit of the model.
  std::vector<ScheduledUnit> units;
  std::vector<UnitBytes> bytes;
  std::vector<UnitMessages> messages;

  bool casts() const { return options.stored_bytes != options.compute_bytes; }
};

// InvalidArgument: no ranks; shard_ranks or backward_group_size that do not
// divide; element sizes other than 1, 2, 4 and 8; options that do not go
// together; units that FlatLayout refuses.
absl::StatusOr<ShardedShape> Shard(const ModelShape& model,
                                   const ShardingOptions& options);

// Where all ranks of a group are on one host they compute with one copy: the
// resting shards, or where these have another dtype, one of which each rank has
// a part.
void ShareGathered(int ranks_on_host, ShardedShape& shape);

}  // namespace fsdp::simulator

#endif  // PLANNER_SIMULATOR_SHARDING_H_
