// Reductions of gradients by the user's own means: with compression, for
// example. Set by ShardedModel::SetReductionHooks().
#ifndef FSDP_RUNTIME_REDUCTION_HOOKS_H_
#define FSDP_RUNTIME_REDUCTION_HOOKS_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "comm/work.h"

namespace fsdp {

// A hook starts the reduction of one flat parameter's gradients and returns
// what ends with it. It runs in the thread of the backward; on a device, with
// the stream of reductions as the current one. All ranks of a group make the
// same calls in the same order. Of a call,
//   unit    is the unit's name, and which of its flat parameters where it has
//           several: the label for collectives. It lives as long as the model
//   group   whose ranks' gradients are summed; lives as long as the model
//   tensors are 1-D, contiguous, in the dtype that gradients are reduced in
//           and on the model's device. Their memory is the hook's until the
//           Work that it returns has ended; then other units' gradients use it
// The Work must not end before every rank of the group has begun its part.
struct ReduceScatterCall {
  const std::string& unit;
  comm::Communicator& group;
  // One segment of own.numel() elements for each rank of `group`, in the order
  // of ranks. The last elements of each are counts that no compression may
  // turn from or to zero. Left with whatever the hook likes.
  at::Tensor whole;
  // A view of this rank's segment: afterwards, the sum of all ranks' segments.
  at::Tensor own;
};
using ReduceScatterHook =
    std::function<absl::StatusOr<std::unique_ptr<comm::Work>>(
        const ReduceScatterCall&)>;

// The same for the all-reduce over replicas of what has been reduce-scattered.
struct AllReduceCall {
  const std::string& unit;
  comm::Communicator& group;  // the replicas
  // This rank's segment; afterwards, the sum of all replicas' segments.
  at::Tensor own;
};
using AllReduceHook = std::function<absl::StatusOr<std::unique_ptr<comm::Work>>(
    const AllReduceCall&)>;

}  // namespace fsdp

#endif  // FSDP_RUNTIME_REDUCTION_HOOKS_H_
