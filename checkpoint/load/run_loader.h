// Loads a checkpoint back into a run.
#ifndef CHECKPOINT_LOAD_RUN_LOADER_H_
#define CHECKPOINT_LOAD_RUN_LOADER_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/load/tensor_loader.h"
#include "checkpoint/run/run.h"

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

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_LOAD_RUN_LOADER_H_
