// Computes the norm of sharded gradients and clips them by it.
#ifndef FSDP_OPTIM_GRAD_CLIP_H_
#define FSDP_OPTIM_GRAD_CLIP_H_

#include <ATen/core/Tensor.h>

#include <optional>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "ranges/tensor_range.h"

namespace fsdp {

// They are the same on all ranks.
struct ClipGradNormOptions {
  double max_norm = 1.0;   // > 0; infinity only measures
  double norm_type = 2.0;  // p > 0; infinity: the largest absolute value

  // Refuses a norm that is infinite or NaN; the host then waits for the device.
  // If false, such a norm makes gradients zero or NaN, as torch's
  // clip_grad_norm_ does.
  bool error_if_nonfinite = false;

  // Longest wait of the host. Positive; if unset, the communicator's.
  std::optional<absl::Duration> timeout = std::nullopt;
};

// Multiplies all gradients by min(1, max_norm / (norm + 1e-6)). `norm` is the
// p-norm of the gradients of all ranks as one vector, in which each range
// counts once, however many ranks hold it. Returns the norm: one element
// without dimensions, float64 if a shard is and float32 otherwise, with the
// same bits on all ranks. It is computed in float32 at least.
//
// Collective: one all-reduce over `world`, all ranks that hold a part of the
// model, also those without a gradient. Parameters without one are skipped.
//
// InvalidArgument, before anything is sent: max_norm, norm_type or the timeout
// is not positive. FailedPrecondition, on all ranks and with gradients
// unchanged: error_if_nonfinite has refused the norm.
absl::StatusOr<at::Tensor> ClipGradNorm(comm::Communicator& world,
                                        absl::Span<const TensorRange> shards,
                                        const ClipGradNormOptions& options);

}  // namespace fsdp

#endif  // FSDP_OPTIM_GRAD_CLIP_H_
