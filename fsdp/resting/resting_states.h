// Optimizers whose states may rest elsewhere (fsdp/options/offload_options.h).
#ifndef FSDP_RESTING_RESTING_STATES_H_
#define FSDP_RESTING_RESTING_STATES_H_

#include <ATen/core/Tensor.h>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace fsdp {

// Those of this library, for texts of errors.
inline constexpr char kFusedOptimizers[] = "FusedAdamW, FusedAdam or FusedSGD";

class RestingStates {
 public:
  virtual ~RestingStates() = default;
  // Moves states that lie in memory, because they were loaded, to where they
  // rest, and adds those that an earlier run has kept (OffloadOptions::keep).
  // step() does the same. After an error some have been moved.
  virtual absl::Status TakeUpStates() = 0;
  // The same of these parameters, and of those that lie in one memory with
  // them; of others nothing is brought in.
  virtual absl::Status TakeUpStatesOf(
      absl::Span<const at::Tensor> parameters) = 0;
};

}  // namespace fsdp

#endif  // FSDP_RESTING_RESTING_STATES_H_
