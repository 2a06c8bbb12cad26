// Fills a model from files as a plan says, and a run from a checkpoint.
#ifndef CHECKPOINT_LOAD_TENSOR_LOADER_H_
#define CHECKPOINT_LOAD_TENSOR_LOADER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/files/file_system.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/load/load_plan.h"
#include "checkpoint/run/run.h"
#include "checkpoint/run/run_values.h"
#include "ranges/tensor_range.h"

namespace fsdp::checkpoint {

// Called now and then with the bytes of the plan that have been read.
using LoadProgress = std::function<void(int64_t bytes, int64_t all)>;

// Returns the bytes that LoadTensors() reads.
int64_t BytesOf(const LoadPlan& plan);

// InvalidArgument: tensors that the files have twice (LoadPlan::copied) are not
// equal. `reader` is that of LoadTensors().
absl::Status CompareCopies(const LoadPlan& plan, RangeReader& reader);

// Fills `targets` as `plan` says. `reader` has the files of the catalog, by
// their numbers plus `first_file`. Targets that rest elsewhere come into memory
// one unit at a time; a target that is put together from whole tensors costs
// the memory of these. After an error some targets are filled. `progress` may
// be null.
absl::Status LoadTensors(const LoadPlan& plan,
                         absl::Span<const TensorRange> targets,
                         RangeReader& reader, const LoadProgress& progress,
                         int64_t first_file = 0);

// Returns how to read files into a run. Ranks with equal parts read the same
// bytes, which the page cache gives to all but the first; if the model is not
// sharded, these are all `world_size` ranks. For a device the reader's memory
// is page-locked, if anything can lock it.
RangeReaderOptions ReaderOptionsFor(const RunValues& values, int world_size);

// --- All of a run ------------------------------------------------------------

// The source of a run, and the ranks that load it.
struct LoadContext {
  FileSystem* files = nullptr;
  std::string root;  // the folder of the run's checkpoints
  Together together;
  bool strict = true;
  // The same as in CheckpointerOptions; may be null.
  std::function<bool(const std::string& name)> saves = nullptr;
  // Counts the model and the optimizer together; may be null.
  LoadProgress progress = nullptr;
};

// Fills `run` from the checkpoint of `step`, and returns the steps of all that
// there are, rising. Ranks agree twice, and nothing is changed before the first
// time. Errors are those of Checkpointer::Load().
absl::StatusOr<std::vector<int64_t>> LoadRun(const LoadContext& context,
                                             int64_t step, TrainingRun& run);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_LOAD_TENSOR_LOADER_H_
