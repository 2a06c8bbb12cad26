#include "fsdp/options/options.h"

namespace fsdp {

const char* ToString(ShardingStrategy strategy) {
  switch (strategy) {
    case ShardingStrategy::kFullShard:
      return "full shard";
    case ShardingStrategy::kShardGradOp:
      return "shard gradients and optimizer";
    case ShardingStrategy::kShardOptimizer:
      return "shard optimizer";
    case ShardingStrategy::kNoShard:
      return "no shard";
    case ShardingStrategy::kHybridShard:
      return "hybrid shard";
    case ShardingStrategy::kHybridShardGradOp:
      return "hybrid shard gradients and optimizer";
  }
  return "?";
}

}  // namespace fsdp
