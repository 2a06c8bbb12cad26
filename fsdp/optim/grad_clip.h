// The norm of sharded gradients, and clipping by it.
#ifndef FSDP_OPTIM_GRAD_CLIP_H_
#define FSDP_OPTIM_GRAD_CLIP_H_

#include <ATen/core/Tensor.h>

#include <optional>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "fsdp/model/named_shard.h"

namespace fsdp {

// The same on all ranks.
struct ClipGradNormOptions {
  double max_norm = 1.0;   // > 0; infinity only measures
  double norm_type = 2.0;  // p > 0; infinity: the largest absolute value

  // Refuse to clip by a norm that is infinite or NaN, for which the host waits
  // for the device. Otherwise such a norm makes gradients zero or NaN, as
  // torch's clip_grad_norm_ does.
  bool error_if_nonfinite = false;

  // Longest wait of the host; positive. Unset: the communicator's default.
  std::optional<absl::Duration> timeout = std::nullopt;
};

// Multiplies all gradients by min(1, max_norm / (norm + 1e-6)), `norm` being
// the p-norm of the gradients of all ranks as one vector, each range counted
// once however many ranks hold it. Returns the norm: one element without
// dimensions, float64 where a shard is and float32 otherwise, with the same
// bits on all ranks.
//
// One all-reduce over `world`, which is all ranks that hold a part of the
// model, also those without a gradient. Parameters without one are skipped.
// Computed in float32 at least.
//
// InvalidArgument before anything is sent: a max_norm or norm_type that is not
// positive. FailedPrecondition on all ranks, gradients untouched:
// error_if_nonfinite.
absl::StatusOr<at::Tensor> ClipGradNorm(comm::Communicator& world,
                                        absl::Span<const NamedShard> shards,
                                        const ClipGradNormOptions& options);

}  // namespace fsdp

#endif  // FSDP_OPTIM_GRAD_CLIP_H_
