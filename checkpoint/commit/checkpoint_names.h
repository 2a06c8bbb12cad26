// Names in the folder of a run's checkpoints. All pure: every rank has them.
#ifndef CHECKPOINT_COMMIT_CHECKPOINT_NAMES_H_
#define CHECKPOINT_COMMIT_CHECKPOINT_NAMES_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "checkpoint/commit/commit_by.h"

namespace fsdp::checkpoint {

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

#endif  // CHECKPOINT_COMMIT_CHECKPOINT_NAMES_H_
