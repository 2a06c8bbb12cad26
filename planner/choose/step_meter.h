// Measures a forward and a backward of a model that is not sharded, module by
// module.
#ifndef PLANNER_CHOOSE_STEP_METER_H_
#define PLANNER_CHOOSE_STEP_METER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"
#include "fsdp/setup/shard_plan.h"
#include "planner/choose/step_profile.h"

namespace fsdp {

// Runs `loss(rows)` and its backward several times: for few rows first, and for
// all of `rows` only if that fits `memory_bytes`; otherwise estimates that.
// Parameters that are deferred, or computed in another dtype than they are
// stored in, are zeros meanwhile, which take no memory on a CPU. Afterwards the
// model is as it was: values, buffers, gradients, random states. Memory is what
// LibTorch's allocators report for this thread. Errors: InvalidArgument if the
// loss is not one element that requires grad; what LibTorch throws.
absl::StatusOr<StepProfile> MeasureStep(
    const ShardPlan& plan, const std::function<at::Tensor(int64_t)>& loss,
    int64_t rows, int64_t memory_bytes);

}  // namespace fsdp

#endif  // PLANNER_CHOOSE_STEP_METER_H_
