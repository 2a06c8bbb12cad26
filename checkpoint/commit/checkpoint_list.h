// Which checkpoints a run's folder has. Changes nothing, and needs no claim.
#ifndef CHECKPOINT_COMMIT_CHECKPOINT_LIST_H_
#define CHECKPOINT_COMMIT_CHECKPOINT_LIST_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/commit/commit_by.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint {

struct Committed {
  int64_t step = 0;
  std::string path;  // of its folder
};

// Those that have a manifest, by rising step, however sound it and the other
// files are. One that was just being replaced when a run died is among them.
absl::StatusOr<std::vector<Committed>> ListCheckpoints(FileSystem& files,
                                                       const std::string& root);

// The name in `latest`; empty where there is no such file.
absl::StatusOr<std::string> NamedLatest(FileSystem& files,
                                        const std::string& root);

// What `latest` names if it is one of those, otherwise the newest; none if
// there are none. Higher steps than `latest` are of a line of training that was
// given up, because an older checkpoint was loaded. Where checkpoints are
// committed by manifests: the newest that is not marked as given up.
absl::StatusOr<std::optional<Committed>> LatestCheckpoint(
    FileSystem& files, const std::string& root);

// Whether checkpoints are committed by manifests, by the names in a run's
// folder.
bool IsByManifest(const std::vector<std::string>& names);

// Of a folder where they are: paths of those at whose manifests a run has died,
// which LatestCheckpoint() passes over.
absl::StatusOr<std::vector<std::string>> TornCheckpoints(
    FileSystem& files, const std::string& root);

struct Retention {
  int64_t keep_last = 0;   // the newest ones; 0: all
  int64_t keep_every = 0;  // and steps that are multiples of it; 0: none
  std::set<int64_t> keep;  // and these, as the one that was loaded and verified
  std::set<int64_t> ignore = {};  // neither counted nor removed
};

// Of `steps`, which rise, those that need not be kept; never the newest, nor
// `latest`.
std::vector<int64_t> StepsToDelete(const std::vector<int64_t>& steps,
                                   std::optional<int64_t> latest,
                                   const Retention& retention);

// Names in the folder of a run's checkpoints. All pure: every rank has them.

// The folder is ours if it has this file; its text says who uses it.
inline constexpr char kMarkerName[] = ".libtorch_fsdp-checkpoints";
// A folder that has it commits by manifests (CommitBy): `latest` is for people
// and scripts there, and may be old or missing.
inline constexpr char kByManifestName[] = ".libtorch_fsdp-by-manifest";
// Holds the name of the newest checkpoint and a newline.
inline constexpr char kLatestName[] = "latest";
// Holds the same of the one that is just being committed, and becomes "latest".
inline constexpr char kNextName[] = "latest.tmp";
inline constexpr int64_t kMaxLatestBytes = 4096;  // that are believed

// What becomes of the folder of a step that is committed by its name. Only
// kCommitted has no suffix; that of
// kIncomplete has the token of the run that writes it: ranks of a run that was
// killed, which may go on for a while, do not write into the next one's.
enum class Stage {
  kCommitted,   // "step-7"; by its manifest: if it has one
  kIncomplete,  // "step-7.incomplete-4f1a": being written, or left
  kReplaced,    // "step-7.replaced": committed, until the one after it is
  kDeleted,     // "step-7.deleted": partly gone already
};

// Not of kIncomplete.
std::string StepName(int64_t step, Stage stage = Stage::kCommitted);
std::string StepPath(absl::string_view root, int64_t step,
                     Stage stage = Stage::kCommitted);
// `token`: [0-9a-f]+.
std::string IncompletePath(absl::string_view root, int64_t step,
                           absl::string_view token);
// Of the folder that its files are written to.
std::string WrittenPath(absl::string_view root, int64_t step,
                        absl::string_view token, CommitBy commit_by);

struct StepFolder {
  int64_t step = 0;
  Stage stage = Stage::kCommitted;
};

// Nothing for a name that those above do not make.
std::optional<StepFolder> ParseStepName(absl::string_view name);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_COMMIT_CHECKPOINT_LIST_H_
