// checkpoint prune FOLDER.
#ifndef TOOLS_CHECKPOINT_PRUNE_H_
#define TOOLS_CHECKPOINT_PRUNE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "checkpoint/files/file_system.h"
#include "tools/checkpoint/text.h"

namespace fsdp::checkpoint::tool {

struct PruneOptions {
  int64_t keep_last = 0;   // at least 1
  int64_t keep_every = 0;  // 0: none besides
  bool dry_run = false;
  OnBytes progress;  // of reading the newest one
};

// Removes checkpoints of a run that need not be kept, and what dead runs have
// left, after it has read the newest one and found it sound; says which. With
// `dry_run` it only says. DataLoss, with all checkpoints left, where the newest
// one is damaged; FailedPrecondition while a run uses the folder. Where
// checkpoints are committed by manifests nobody knows whether one does: what
// has no manifest is left to the next run.
absl::StatusOr<std::string> Prune(FileSystem& files, const std::string& root,
                                  const PruneOptions& options);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_PRUNE_H_
