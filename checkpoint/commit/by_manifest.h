// The folder of a run whose checkpoints are committed by their manifests
// (CommitBy). Nothing here renames, locks or overwrites.
#ifndef CHECKPOINT_COMMIT_BY_MANIFEST_H_
#define CHECKPOINT_COMMIT_BY_MANIFEST_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint {

// Turns `root`, whose `latest` has been right so far, into such a folder.
absl::Status BeginByManifest(FileSystem& files, const std::string& root);

// Removes the folders of steps that have no manifest, or one that was being
// written when a run died.
absl::Status RemoveUnfinished(FileSystem& files, const std::string& root);

// Removes the folder of a step, if there is one. From the first change on it is
// no checkpoint; after OK nothing of it is left.
absl::Status RemoveByManifest(FileSystem& files, const std::string& path);

// Makes StepPath(root, manifest.step) a checkpoint and the newest one: higher
// steps are marked as given up. The files that the manifest names are there and
// synced. After an error it is no checkpoint, unless the text says so.
absl::Status CommitByManifest(FileSystem& files, const std::string& root,
                              const Manifest& manifest);

// Returns `why`, an error, with "; step N may be saved all the same" at its
// end: for a commit that has neither succeeded nor been undone.
absl::Status MayBeSaved(const absl::Status& why, int64_t step);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_COMMIT_BY_MANIFEST_H_
