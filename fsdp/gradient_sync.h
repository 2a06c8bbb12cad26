// Which units' gradients the next backwards reduce, and how far: PyTorch's
// set_requires_gradient_sync() and set_requires_all_reduce().
#ifndef FSDP_GRADIENT_SYNC_H_
#define FSDP_GRADIENT_SYNC_H_

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include "absl/status/status.h"
#include "fsdp/runtime/reduction_hooks.h"

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

// Reductions by other means than the communicator's own.

// Reduces in `dtype`, fp16 or bf16, what is kept in a wider one: half the bytes
// for sums that are rounded. After fp16_compress_hook and bf16_compress_hook of
// PyTorch.
ReduceScatterHook CompressedReduceScatter(c10::ScalarType dtype);
AllReduceHook CompressedAllReduce(c10::ScalarType dtype);

}  // namespace fsdp

#endif  // FSDP_GRADIENT_SYNC_H_
