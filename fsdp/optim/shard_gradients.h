// Groups the gradients of a rank's shards and reduces numbers about those of
// all ranks, for clipping and scaling.
#ifndef FSDP_OPTIM_SHARD_GRADIENTS_H_
#define FSDP_OPTIM_SHARD_GRADIENTS_H_

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "fsdp/memory/resting_memory.h"
#include "ranges/tensor_range.h"

namespace fsdp {

// Gradients that one fused operation can take.
struct GradientGroup {
  at::Device device;
  at::ScalarType dtype;
  int replicas;  // TensorRange::replicas
  std::vector<at::Tensor> each;
  // The same gradients, with neighbours in memory merged into one tensor. What
  // rests elsewhere may be merged otherwise, so sums are of `each`.
  std::vector<at::Tensor> gradients = {};

  // The dtype to compute in: float32 for halves.
  at::ScalarType math_dtype() const { return at::toOpMathType(dtype); }
};

// Groups the gradients of `shards`, without undefined and empty ones.
std::vector<GradientGroup> GroupGradients(absl::Span<const TensorRange> shards);

// Calls `visit` once with all `gradients`, which are `each` or `gradients` of a
// group. If some rest off the device, it calls `visit` for each shard in order,
// with its gradients in memory. Errors are those of RestingMemory.
absl::Status ForEachInMemory(
    const std::vector<at::Tensor>& gradients, Use use,
    absl::FunctionRef<void(const std::vector<at::Tensor>&)> visit);

// Raises the version of each gradient of `group`, after operators have written
// to its merged tensors.
void CountWrites(const GradientGroup& group);

// Runs `fn`. If it fails, aborts `world`, since other ranks do not know of it.
absl::Status OrAbort(comm::Communicator& world, const std::string& what,
                     FallibleRef fn);

// Returns the device on which numbers about all gradients are computed: that of
// the shards, which all ranks have, while some may lack gradients.
at::Device DeviceOf(absl::Span<const TensorRange> shards);

// All-reduces `number`, one or a few of them. If it is on the CPU, the host
// waits for at most `timeout`, by default the communicator's; otherwise the
// device's stream waits.
absl::Status ReduceNumber(comm::Communicator& world, const at::Tensor& number,
                          comm::ReduceOp op, const std::string& label,
                          std::optional<absl::Duration> timeout);

// The names of the first parameters, in the order of the shards, that are not
// finite on some rank; empty if all are finite.
struct NotFinite {
  std::string value;     // the first whose value is not finite
  std::string gradient;  // the first whose gradient is not finite
};

// Finds them, with the same result on all ranks. Collective, unless `world` is
// null because this rank has the whole model. It brings resting values in.
absl::StatusOr<NotFinite> FindNotFinite(comm::Communicator* world,
                                        absl::Span<const TensorRange> shards,
                                        const std::string& label);

}  // namespace fsdp

#endif  // FSDP_OPTIM_SHARD_GRADIENTS_H_
