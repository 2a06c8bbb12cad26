// Hooks that reduce gradients by the user's own means, for example with
// compression. ShardedModel::SetReductionHooks() sets them.
#ifndef FSDP_RUNTIME_REDUCTION_HOOKS_H_
#define FSDP_RUNTIME_REDUCTION_HOOKS_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace fsdp {

namespace comm {
class Communicator;
class Work;
}  // namespace comm

// One call of a hook, which starts the reduction of one flat parameter's
// gradients and returns a Work that ends with it. It runs in the thread of the
// backward, and on a device with the stream of reductions as the current one.
// All ranks of a group make the same calls in the same order. A call has
//   unit     the unit's name, and which of its flat parameters if there are
//            several: the label for collectives. It lives as long as the model
//   group    the ranks whose gradients are summed; lives as long as the model
//   tensors  1-D and contiguous, on the model's device, in the dtype that
//            gradients are reduced in. The hook owns their memory until its
//            Work has ended; then other units' gradients use it
// The Work must not end before every rank of the group has begun its part.
struct ReduceScatterCall {
  const std::string& unit;    // "blocks.3"
  comm::Communicator& group;  // that shares the sum
  // One segment of own.numel() elements for each rank of `group`, in the order
  // of ranks. The last elements of each are counts: a compression must keep
  // zeros zero and others nonzero. The hook may leave anything here.
  at::Tensor whole;
  // A view of this rank's segment. Afterwards it holds the sum of all ranks'
  // segments.
  at::Tensor own;
};
// Starts a reduce-scatter in place of the communicator's.
using ReduceScatterHook =
    std::function<absl::StatusOr<std::unique_ptr<comm::Work>>(
        const ReduceScatterCall&)>;

// A call of the hook for the all-reduce over replicas, which follows the
// reduce-scatter.
struct AllReduceCall {
  const std::string& unit;    // "blocks.3"
  comm::Communicator& group;  // the replicas
  // This rank's segment. Afterwards it holds the sum of all replicas' segments.
  at::Tensor own;
};
// Starts an all-reduce in place of the communicator's.
using AllReduceHook = std::function<absl::StatusOr<std::unique_ptr<comm::Work>>(
    const AllReduceCall&)>;

}  // namespace fsdp

#endif  // FSDP_RUNTIME_REDUCTION_HOOKS_H_
