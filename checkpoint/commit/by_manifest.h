// The folder of a run whose checkpoints are committed by their manifests
// (CommitBy): nothing here renames, locks or writes over anything.
#ifndef CHECKPOINT_COMMIT_BY_MANIFEST_H_
#define CHECKPOINT_COMMIT_BY_MANIFEST_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint {

// Makes `root`, whose `latest` is right until now, such a folder.
absl::Status BeginByManifest(FileSystem& files, const std::string& root);

// Removes folders of steps that have no manifest, or the torn one at which a
// run has died.
absl::Status RemoveUnfinished(FileSystem& files, const std::string& root);

// The folder of a step, if there is one, which is no checkpoint from its first
// change on. OK: nothing of it is left.
absl::Status RemoveByManifest(FileSystem& files, const std::string& path);

// The files that the manifest names are in StepPath(root, manifest.step) and
// synced: from now on it is a checkpoint, and the newest one, as higher steps
// are given up. After an error it is not one, unless the text says so.
absl::Status CommitByManifest(FileSystem& files, const std::string& root,
                              const Manifest& manifest);

// What is said of a step whose commit has neither succeeded nor been undone.

// `why`, an error, with "; step N may be saved all the same" at its end.
absl::Status MayBeSaved(const absl::Status& why, int64_t step);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_COMMIT_BY_MANIFEST_H_
