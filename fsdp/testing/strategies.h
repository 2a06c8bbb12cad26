// All sharding strategies, and a mesh that any of them can have.
#ifndef FSDP_TESTING_STRATEGIES_H_
#define FSDP_TESTING_STRATEGIES_H_

#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "comm/mesh.h"
#include "fsdp/options/options.h"
#include "fsdp/testing/toy_model.h"

namespace fsdp::testing {

inline constexpr ShardingStrategy kStrategies[] = {
    ShardingStrategy::kFullShard,      ShardingStrategy::kShardGradOp,
    ShardingStrategy::kShardOptimizer, ShardingStrategy::kNoShard,
    ShardingStrategy::kHybridShard,    ShardingStrategy::kHybridShardGradOp};

// Returns a mesh with rows of two ranks, or of all ranks if their number is
// odd.
inline absl::StatusOr<comm::Mesh> MeshOf(comm::Communicator& world) {
  const int row = world.world_size() % 2 == 0 ? 2 : world.world_size();
  return comm::Mesh::Create(Unowned(world),
                            {{"replicate", -1}, {"shard", row}});
}

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_STRATEGIES_H_
