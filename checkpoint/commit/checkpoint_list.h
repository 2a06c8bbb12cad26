// Lists the checkpoints in a run's folder. Changes nothing, and needs no claim.
#ifndef CHECKPOINT_COMMIT_CHECKPOINT_LIST_H_
#define CHECKPOINT_COMMIT_CHECKPOINT_LIST_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/files/file_system.h"
#include "checkpoint/commit/save_layout.h"

namespace fsdp::checkpoint {

struct Committed {
  int64_t step = 0;
  std::string path;  // of its folder
};

// Returns the checkpoints that have a manifest, by rising step, sound or not.
// One that was being replaced when a run died is among them.
absl::StatusOr<std::vector<Committed>> ListCheckpoints(FileSystem& files,
                                                       const std::string& root);

// Returns the name in the file `latest`; empty if there is no such file.
absl::StatusOr<std::string> NamedLatest(FileSystem& files,
                                        const std::string& root);

// Returns the checkpoint that `latest` names, or the newest if `latest` names
// none of the list, or nothing if the list is empty. Steps above `latest`
// belong to a line of training that was given up when an older checkpoint was
// loaded. In a folder that commits by manifests it returns the newest that is
// whole and, unless all are, not marked as given up.
absl::StatusOr<std::optional<Committed>> LatestCheckpoint(
    FileSystem& files, const std::string& root);

// Returns whether a run's folder with these names in it commits by manifests.
bool IsByManifest(const std::vector<std::string>& names);

// In a folder that commits by manifests, returns the paths of checkpoints at
// whose manifest a run has died. LatestCheckpoint() passes over them.
absl::StatusOr<std::vector<std::string>> TornCheckpoints(
    FileSystem& files, const std::string& root);

// Names in the folder of a run's checkpoints. Functions are pure: every rank
// computes the same.

// A folder belongs to us if it has this file, whose text says who uses it.
inline constexpr char kMarkerName[] = ".libtorch_fsdp-checkpoints";
// A folder with this file commits by manifests (CommitBy). `latest` is then for
// people and scripts, and may be old or missing.
inline constexpr char kByManifestName[] = ".libtorch_fsdp-by-manifest";
// Holds the folder name of the newest checkpoint and a newline.
inline constexpr char kLatestName[] = "latest";
// Holds the same for a checkpoint that is being committed; becomes "latest".
inline constexpr char kNextName[] = "latest.tmp";
inline constexpr int64_t kMaxLatestBytes = 4096;  // longer files are refused

// The stage of the folder of a step, which its suffix tells. That of
// kIncomplete has the token of the run that writes, so that ranks of a killed
// run, which may go on for a while, do not write into the next run's.
enum class Stage {
  kCommitted,   // "step-7"; by manifest, only if it has one
  kIncomplete,  // "step-7.incomplete-4f1a": being written, or left behind
  kReplaced,    // "step-7.replaced": kept until its successor is committed
  kDeleted,     // "step-7.deleted": partly removed
};

// `stage` is not kIncomplete.
std::string StepName(int64_t step, Stage stage = Stage::kCommitted);
std::string StepPath(absl::string_view root, int64_t step,
                     Stage stage = Stage::kCommitted);
// Returns the folder into which the files of the step are written. `token` is
// one or more of [0-9a-f].
std::string WrittenPath(absl::string_view root, int64_t step,
                        absl::string_view token, CommitBy commit_by);

struct StepFolder {
  int64_t step = 0;
  Stage stage = Stage::kCommitted;
};

// Returns nothing for a name that none of the above makes.
std::optional<StepFolder> ParseStepName(absl::string_view name);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_COMMIT_CHECKPOINT_LIST_H_
