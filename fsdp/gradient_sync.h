// Which units' gradients the next backwards reduce, and how far: PyTorch's
// set_requires_gradient_sync() and set_requires_all_reduce().
#ifndef FSDP_GRADIENT_SYNC_H_
#define FSDP_GRADIENT_SYNC_H_

#include <torch/nn/module.h>

#include "absl/status/status.h"

namespace fsdp {

// Of the unit that `module` is and, with `recurse`, of all units inside it; of
// a sharded model, its module(). From now on, between steps, all ranks alike.
// FailedPrecondition: there is no such unit; inside a forward or backward.

// Whether backwards reduce the units' gradients. Those that are not stay whole
// on each rank, and the next backward that does reduces the sum of all. Inside
// NoSync() nothing is reduced whatever this says.
absl::Status SetRequiresGradientSync(torch::nn::Module& module, bool required,
                                     bool recurse = true);

// Of replicated units (hybrid sharding, kNoShard), whether backwards that
// reduce gradients all-reduce them over replicas, too. What only has been
// reduce-scattered is kept, one shard's gradient in the reduce dtype, and the
// next backward that does all-reduces the sum of all. No effect on others.
absl::Status SetRequiresAllReduce(torch::nn::Module& module, bool required,
                                  bool recurse = true);

}  // namespace fsdp

#endif  // FSDP_GRADIENT_SYNC_H_
