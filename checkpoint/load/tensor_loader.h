// Fills a model from files.
#ifndef CHECKPOINT_LOAD_TENSOR_LOADER_H_
#define CHECKPOINT_LOAD_TENSOR_LOADER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/load/load_plan.h"
#include "checkpoint/run/run_values.h"

namespace fsdp::checkpoint {

// Gets, now and then, how many bytes of the plan have been read.
using LoadProgress = std::function<void(int64_t bytes, int64_t all)>;

// All that LoadTensors() reads.
int64_t BytesOf(const LoadPlan& plan);

// InvalidArgument where what the files have twice (LoadPlan::copied) is not
// equal. `reader` as for LoadTensors().
absl::Status CompareCopies(const LoadPlan& plan, RangeReader& reader);

// Carries out `plan`, of `targets`. `reader`: over the files of the catalog, by
// their numbers plus `first_file`. What rests elsewhere is in memory one unit
// at a time; a target that is put together from whole tensors costs the memory
// of these. After an error some targets are filled. `progress` may be null.
absl::Status LoadTensors(const LoadPlan& plan,
                         absl::Span<const LoadTarget> targets,
                         RangeReader& reader, const LoadProgress& progress,
                         int64_t first_file = 0);

// What of a model is to be filled from files.

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

#endif  // CHECKPOINT_LOAD_TENSOR_LOADER_H_
