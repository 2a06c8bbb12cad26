// What clipping and scaling share: the gradients of a rank's shards, and
// numbers about those of all ranks.
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
#include "comm/call.h"
#include "comm/communicator.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/model/named_shard.h"

namespace fsdp {

// Gradients that one fused operation can take.
struct GradientGroup {
  at::Device device;
  at::ScalarType dtype;
  int replicas;  // of NamedShard
  std::vector<at::Tensor> each;
  // The same, but neighbours in memory, as most of a unit's are, as one.
  std::vector<at::Tensor> gradients = {};

  // In which to compute: float32 for halves.
  at::ScalarType math_dtype() const { return at::toOpMathType(dtype); }
};

// Without undefined and empty ones.
std::vector<GradientGroup> GroupGradients(absl::Span<const NamedShard> shards);

// Calls `visit` with all of `group` in one go, or, where gradients rest
// elsewhere, with those of one shard after the other, in their order and in
// memory meanwhile. Errors as RestingMemory's.
absl::Status ForEachInMemory(
    const GradientGroup& group, Use use,
    absl::FunctionRef<void(const std::vector<at::Tensor>&)> visit);

// What operators have written to the gradients of `group` counts as a write to
// each of them.
void CountWrites(const GradientGroup& group);

// Runs `fn`, whose failures the other ranks do not know of: they are told.
absl::Status OrAbort(comm::Communicator& world, const std::string& what,
                     FallibleRef fn);

// Where numbers about all gradients are computed. A matter of the shards, which
// all ranks have, not of the gradients, which some may lack.
at::Device DeviceOf(absl::Span<const NamedShard> shards);

// All-reduces `number` of one element. The host waits at most `timeout`, by
// default the communicator's, and only where the number is on
// the CPU; another device's stream waits otherwise.
absl::Status ReduceNumber(comm::Communicator& world, const at::Tensor& number,
                          comm::ReduceOp op, const std::string& label,
                          std::optional<absl::Duration> timeout);

// Which of a model's parameters is the first, in the order of the shards, with
// an element that is not finite on any rank. Empty: there is none.
struct NotFinite {
  std::string value;     // the name of the first with such a value
  std::string gradient;  // of the first with such a gradient
};

// The same on all ranks; `world` is null where a rank has the whole model.
// Collective. Values are read where they rest.
absl::StatusOr<NotFinite> FindNotFinite(comm::Communicator* world,
                                        absl::Span<const NamedShard> shards,
                                        const std::string& label);

}  // namespace fsdp

#endif  // FSDP_OPTIM_SHARD_GRADIENTS_H_
