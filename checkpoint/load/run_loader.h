// Loads a checkpoint back into a run.
#ifndef CHECKPOINT_LOAD_RUN_LOADER_H_
#define CHECKPOINT_LOAD_RUN_LOADER_H_

#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/format/catalog.h"
#include "checkpoint/load/load_plan.h"
#include "checkpoint/load/optimizer_loader.h"
#include "checkpoint/load/source_folder.h"
#include "checkpoint/load/tensor_loader.h"
#include "checkpoint/run/run.h"
#include "checkpoint/run/run_values.h"
#include "checkpoint/run/training_json.h"
#include "fsdp/optim/weight_average.h"
#include "ranges/tensor_range.h"

namespace fsdp::checkpoint {

// The source of a run, and the ranks that load it.
struct LoadContext {
  FileSystem* files = nullptr;
  std::string root;  // the folder of the run's checkpoints
  int rank = 0;
  int world_size = 1;
  // Returns OK if `mine` is OK on all ranks, otherwise one rank's error on all.
  std::function<absl::Status(const absl::Status& mine)> agree;
  bool strict = true;
  // The same as in CheckpointerOptions; may be null.
  std::function<bool(const std::string& name)> saves = nullptr;
  // Counts the model and the optimizer together; may be null.
  LoadProgress progress;
};

// Fills `run` from the checkpoint of `step`. Ranks agree twice, and nothing is
// changed before the first time. Errors are those of Checkpointer::Load().
absl::Status LoadRun(const LoadContext& context, int64_t step,
                     TrainingRun& run);

// Fills the model and the optimizer of a run from files of any format. Each
// function is called once, in the order of declaration.
class RunTensors {
 public:
  // Both outlive it. `optimizer` is null if the run has none.
  RunTensors(RunValues& values, torch::optim::Optimizer* optimizer)
      : values_(values), of_run_(optimizer) {}

  // These plan, and change nothing. InvalidArgument lists all that does not
  // fit. If there is no optimizer, nothing is planned or filled for it. The
  // files may lack names for which `saves`, if not null, returns false.
  absl::Status PlanModel(
      Catalog catalog, bool strict,
      const std::function<bool(const std::string& name)>& saves = nullptr);
  // `average` outlives it.
  absl::Status PlanAverage(Catalog catalog, WeightAverage& average,
                           bool strict);
  absl::Status PlanOptimizer(OptimizerLoader::ReadSlot read_slot,
                             TrainingRecord& record, bool strict);

  // Opens the files of the catalogs, which are in `folder`. Changes nothing.
  // `progress` may be null. Errors include those of CompareCopies().
  absl::Status Open(const SourceFolder& folder,
                    const RangeReaderOptions& options, LoadProgress progress);
  // After an error they are partly filled.
  absl::Status FillModel();
  absl::Status FillAverage();
  absl::Status FillOptimizer();

 private:
  // Reads from the files of the catalog of this number.
  absl::Status Read(size_t catalog, const LoadPlan& plan,
                    absl::Span<const TensorRange> targets);

  RunValues& values_;
  torch::optim::Optimizer* const of_run_;
  Catalog model_;
  LoadPlan plan_;  // of the model
  WeightAverage* of_average_ = nullptr;
  Catalog average_;
  std::vector<TensorRange> average_targets_;
  LoadPlan average_plan_;
  std::optional<OptimizerLoader> optimizer_;
  std::unique_ptr<RangeReader> reader_;
  std::vector<int64_t> first_files_;  // of each catalog, in reader_
  LoadProgress progress_;
  // Bytes of the plans, for progress_.
  int64_t done_ = 0;
  int64_t all_ = 0;
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_LOAD_RUN_LOADER_H_
