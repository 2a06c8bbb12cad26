// What of a model is to be filled from files.
#ifndef CHECKPOINT_LOAD_MODEL_TARGETS_H_
#define CHECKPOINT_LOAD_MODEL_TARGETS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/load/load_target.h"
#include "checkpoint/run/run_values.h"

namespace fsdp::checkpoint {

// This rank's ranges of parameters, and all buffers and parameters that are not
// sharded. Valid as long as `values`.
std::vector<LoadTarget> TargetsOf(const RunValues& values);

// How to read what fills them: ranks that have equal parts, `world_size` of
// them where the model is not sharded, read the same bytes, which the page
// cache gives to all but the first.
Caching CachingFor(const RunValues& values, int world_size);

// Memory for something laid out like `values.leaves()[leaf]`, such as an
// optimizer's state; on c10::kMeta, none.
absl::StatusOr<at::Tensor> MakeState(const RunValues& values, int leaf,
                                     c10::ScalarType dtype, c10::Device device);
// What fills such memory. On c10::kMeta, what would: to plan with.
LoadTarget StateTarget(const RunValues& values, int leaf,
                       const at::Tensor& state);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_LOAD_MODEL_TARGETS_H_
