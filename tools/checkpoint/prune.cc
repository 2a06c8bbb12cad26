#include "tools/checkpoint/prune.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "checkpoint/commit/by_manifest.h"
#include "checkpoint/commit/checkpoint_folder.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/manifest.h"
#include "tools/checkpoint/text.h"

namespace fsdp::checkpoint::tool {
namespace {

struct Plan {
  std::vector<int64_t> steps;  // to remove
  std::vector<std::string> leftovers;
};

// Changes nothing. Where nothing can be locked, leftovers may be of a run that
// is at work, and are left to the next one.
absl::StatusOr<Plan> MakePlan(FileSystem& files, const std::string& root,
                              const Retention& retention,
                              const std::vector<std::string>& names) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<Committed> list,
                        ListCheckpoints(files, root));
  FSDP_ASSIGN_OR_RETURN(const std::optional<Committed> latest,
                        LatestCheckpoint(files, root));
  std::vector<int64_t> steps;
  steps.reserve(list.size());
  for (const Committed& one : list) steps.push_back(one.step);
  Plan plan;
  if (latest.has_value()) {
    plan.steps = StepsToDelete(steps, latest->step, retention);
  }
  if (IsByManifest(names)) return plan;
  for (const std::string& name : names) {
    const std::optional<StepFolder> folder = ParseStepName(name);
    if (folder.has_value() && (folder->stage == Stage::kIncomplete ||
                               folder->stage == Stage::kDeleted)) {
      plan.leftovers.push_back(name);
    }
  }
  return plan;
}

// What remains has to be good for something.
absl::Status VerifyNewest(FileSystem& files, const std::string& root,
                          bool by_manifest, const OnBytes& progress) {
  FSDP_ASSIGN_OR_RETURN(const std::optional<Committed> latest,
                        LatestCheckpoint(files, root));
  FSDP_ASSIGN_OR_RETURN(const std::vector<Committed> list,
                        ListCheckpoints(files, root));
  if (!latest.has_value()) return absl::OkStatus();
  // A torn one is none.
  const std::string& path = by_manifest ? latest->path : list.back().path;
  FSDP_ASSIGN_OR_RETURN(const Manifest manifest, ReadManifest(files, path));
  FSDP_ASSIGN_OR_RETURN(const std::vector<Problem> problems,
                        VerifyFiles(files, path, manifest, progress));
  absl::Status sound = ProblemsStatus(path, problems);
  if (sound.ok()) return sound;
  return absl::Status(
      sound.code(),
      absl::StrCat("no checkpoint is removed, since the newest checkpoint is "
                   "damaged; remove that one first: ",
                   sound.message()));
}

std::string Text(const Plan& plan, absl::string_view verb) {
  std::string text;
  for (const int64_t step : plan.steps) {
    absl::StrAppend(&text, verb, " ", StepName(step), "\n");
  }
  for (const std::string& name : plan.leftovers) {
    absl::StrAppend(&text, verb, " ", name, ", which a run has left\n");
  }
  return text.empty() ? "there is nothing to remove\n" : text;
}

}  // namespace

absl::StatusOr<std::string> Prune(FileSystem& files, const std::string& root,
                                  const PruneOptions& options) {
  if (options.keep_last < 1 || options.keep_every < 0) {
    return absl::InvalidArgumentError(
        "prune: say how many to keep: --keep_last=N with N of at least 1");
  }
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, files.List(root));
  // Nobody else's folder becomes one of ours.
  if (std::find(names.begin(), names.end(), kMarkerName) == names.end()) {
    return absl::FailedPreconditionError(absl::StrCat(
        root, " is not the folder of a run: it has no file ", kMarkerName));
  }
  Retention retention;
  retention.keep_last = options.keep_last;
  retention.keep_every = options.keep_every;
  if (options.dry_run) {
    FSDP_ASSIGN_OR_RETURN(const Plan plan,
                          MakePlan(files, root, retention, names));
    return Text(plan, "would remove");
  }
  FSDP_ASSIGN_OR_RETURN(Plan plan, MakePlan(files, root, retention, names));
  if (IsByManifest(names)) {
    FSDP_RETURN_IF_ERROR(
        VerifyNewest(files, root, /*by_manifest=*/true, options.progress));
    for (const int64_t step : plan.steps) {
      FSDP_RETURN_IF_ERROR(RemoveByManifest(files, StepPath(root, step)));
    }
    return Text(plan, "removed");
  }
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointFolder> folder,
                        CheckpointFolder::Claim(files, root));
  FSDP_RETURN_IF_ERROR(
      VerifyNewest(files, root, /*by_manifest=*/false, options.progress));
  FSDP_ASSIGN_OR_RETURN(plan.steps, folder->Prune(retention));
  return Text(plan, "removed");
}

}  // namespace fsdp::checkpoint::tool
