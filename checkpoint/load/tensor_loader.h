// Fills a model from files.
#ifndef CHECKPOINT_LOAD_TENSOR_LOADER_H_
#define CHECKPOINT_LOAD_TENSOR_LOADER_H_

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/load/load_plan.h"
#include "checkpoint/load/load_target.h"

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

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_LOAD_TENSOR_LOADER_H_
