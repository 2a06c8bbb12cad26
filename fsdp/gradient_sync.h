// Chooses the units whose gradients backwards reduce, and how far, as PyTorch's
// set_requires_gradient_sync() and set_requires_all_reduce() do; and reductions
// that send half the bytes.
#ifndef FSDP_GRADIENT_SYNC_H_
#define FSDP_GRADIENT_SYNC_H_

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include "absl/status/status.h"
#include "fsdp/runtime/reduction_hooks.h"

namespace fsdp {

// The first two functions apply to the unit that `module` is and, with
// `recurse`, to all units inside it, from the next backward on. For a sharded
// model pass its module(). All ranks make the same calls, between steps.
// FailedPrecondition: there is no such unit, or it is inside a forward or
// backward.

// Sets whether backwards reduce the units' gradients. If not, gradients stay
// whole on each rank until a backward reduces the sum. Inside NoSync() nothing
// is reduced in any case.
absl::Status SetRequiresGradientSync(torch::nn::Module& module, bool required,
                                     bool recurse = true);

// Sets whether backwards that reduce gradients also all-reduce them over the
// replicate group, for units that have one (hybrid sharding, kNoShard). If not,
// the reduce-scattered gradients are kept, one shard in the reduce dtype, until
// a backward all-reduces the sum.
absl::Status SetRequiresAllReduce(torch::nn::Module& module, bool required,
                                  bool recurse = true);

// These hooks, for SetReductionHooks(), reduce gradients in `dtype`, fp16 or
// bf16, although they are kept in a wider one. They send half the bytes, and
// the sums are rounded. They follow PyTorch's fp16_compress_hook and
// bf16_compress_hook.
ReduceScatterHook CompressedReduceScatter(c10::ScalarType dtype);
AllReduceHook CompressedAllReduce(c10::ScalarType dtype);

}  // namespace fsdp

#endif  // FSDP_GRADIENT_SYNC_H_
