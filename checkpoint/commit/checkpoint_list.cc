#include "checkpoint/commit/checkpoint_list.h"

#include <map>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "checkpoint/commit/checkpoint_names.h"
#include "checkpoint/commit/manifest.h"

namespace fsdp::checkpoint {
namespace {

// What `latest` says; empty where there is none.
absl::StatusOr<std::string> NamedLatest(FileSystem& files,
                                        const std::string& root) {
  absl::StatusOr<std::string> text =
      ReadFile(files, JoinPath(root, kLatestName), kMaxLatestBytes);
  if (absl::IsNotFound(text.status())) return std::string();
  return text;
}

}  // namespace

absl::StatusOr<std::vector<Committed>> ListCheckpoints(
    FileSystem& files, const std::string& root) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, files.List(root));
  std::map<int64_t, std::string> found;
  for (const Stage stage : {Stage::kReplaced, Stage::kCommitted}) {
    for (const std::string& name : names) {
      const std::optional<StepFolder> folder = ParseStepName(name);
      if (!folder.has_value() || folder->stage != stage) continue;
      const std::string path = JoinPath(root, name);
      FSDP_ASSIGN_OR_RETURN(const bool committed,
                            Exists(files, JoinPath(path, kManifestName)));
      if (!committed) continue;
      // The one that it replaces is still there, and better than a damaged one.
      const bool has_other = found.count(folder->step) > 0;
      if (has_other && !ReadManifest(files, path).ok()) continue;
      found[folder->step] = path;
    }
  }
  std::vector<Committed> list;
  list.reserve(found.size());
  for (const auto& [step, path] : found) list.push_back({step, path});
  return list;
}

absl::StatusOr<std::optional<Committed>> LatestCheckpoint(
    FileSystem& files, const std::string& root) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<Committed> list,
                        ListCheckpoints(files, root));
  if (list.empty()) return std::nullopt;
  FSDP_ASSIGN_OR_RETURN(const std::string text, NamedLatest(files, root));
  for (const Committed& one : list) {
    if (absl::StripSuffix(text, "\n") == StepName(one.step)) return one;
  }
  return list.back();
}

std::vector<int64_t> StepsToDelete(const std::vector<int64_t>& steps,
                                   std::optional<int64_t> latest,
                                   const Retention& retention) {
  std::vector<int64_t> out;
  if (retention.keep_last <= 0) return out;
  const auto count = static_cast<int64_t>(steps.size());
  for (int64_t i = 0; i < count - retention.keep_last; ++i) {
    const int64_t step = steps[i];
    const bool every =
        retention.keep_every > 0 && step % retention.keep_every == 0;
    if (!every && step != latest && retention.keep.count(step) == 0) {
      out.push_back(step);
    }
  }
  return out;
}

}  // namespace fsdp::checkpoint
