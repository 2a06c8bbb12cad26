// A checkpoint back into a run.
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

// Where from, and with whom.
struct LoadContext {
  FileSystem* files = nullptr;
  std::string root;  // of the checkpoints of a run
  int rank = 0;
  int world_size = 1;
  // OK where it is OK on all ranks; otherwise one rank's error, on all.
  std::function<absl::Status(const absl::Status& mine)> agree;
  bool strict = true;
  // As CheckpointerOptions has it; may be null.
  std::function<bool(const std::string& name)> saves = nullptr;
  // Of the model and the optimizer together; may be null.
  LoadProgress progress;
};

// Fills all of `run` from the checkpoint of `step`. Two agreements: nothing is
// changed before the first one. Errors as those of Checkpointer::Load().
absl::Status LoadRun(const LoadContext& context, int64_t step,
                     TrainingRun& run);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_LOAD_RUN_LOADER_H_
