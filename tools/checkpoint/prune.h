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
  int64_t keep_every = 0;  // multiples of it stay, too; 0: none
  bool dry_run = false;    // only say what would be removed
  OnBytes progress;        // counts the bytes of the newest one
};

// Removes the checkpoints of a run that need not be kept, and what dead runs
// have left, after it has read the newest one and found it sound. Returns what
// was removed. DataLoss, with all checkpoints left: the newest one is damaged.
// FailedPrecondition: a run uses the folder, or it is none of a run. By
// manifests nobody can tell whether a run uses it: folders without a manifest
// are left to the next run.
absl::StatusOr<std::string> Prune(FileSystem& files, const std::string& root,
                                  const PruneOptions& options);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_PRUNE_H_
