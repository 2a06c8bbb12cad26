// Makes sharded units of the modules of a plan.
#ifndef FSDP_SETUP_SHARDER_H_
#define FSDP_SETUP_SHARDER_H_

#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "comm/mesh.h"
#include "fsdp/options/options.h"
#include "fsdp/resting/offload_space.h"
#include "fsdp/runtime/runtime_common.h"
#include "fsdp/setup/shard_plan.h"

namespace fsdp {

struct ShardedUnits {
  std::vector<RuntimeUnit> units;
  // One for each group that shares memory.
  std::vector<std::unique_ptr<comm::Fence>> fences;
  std::shared_ptr<OffloadSpace> offload;  // null without Options::offload
};

// Splits groups, makes room for what rests elsewhere, and shards the units of
// `root`, one after the other. Buffers get rank 0's values everywhere, and
// ignored parameters keep each rank's own. Collective. After an error that is
// not the same on all ranks the ranks are no longer alike: the mesh is aborted.
absl::StatusOr<ShardedUnits> ShardUnits(ShardPlan& plan,
                                        torch::nn::Module& root,
                                        const comm::Mesh& mesh,
                                        const Options& options,
                                        absl::Duration timeout);

}  // namespace fsdp

#endif  // FSDP_SETUP_SHARDER_H_
