#include "checkpoint/commit/checkpoint_list.h"

#include <algorithm>
#include <map>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/commit/checkpoint_names.h"
#include "checkpoint/commit/manifest.h"

namespace fsdp::checkpoint {
namespace {

constexpr int64_t kMaxLatestBytes = 4096;

// Of the step that `latest` names; -1 if it names none.
absl::StatusOr<int64_t> NamedLatest(FileSystem& files,
                                    const std::string& root) {
  const absl::StatusOr<std::string> text =
      ReadFile(files, JoinPath(root, kLatestName), kMaxLatestBytes);
  if (absl::IsNotFound(text.status())) return -1;
  FSDP_RETURN_IF_ERROR(text.status());
  const std::optional<StepFolder> folder =
      ParseStepName(absl::StripSuffix(*text, "\n"));
  const bool is_name = folder.has_value() && folder->stage == Stage::kCommitted;
  return is_name ? folder->step : -1;
}

// The highest of `list` that comes right after `step`; null if there is none.
const Committed* FindNext(FileSystem& files, absl::Span<const Committed> list,
                          int64_t step) {
  const Committed* next = nullptr;
  for (const Committed& one : list) {
    if (one.step <= step) continue;
    const absl::StatusOr<Manifest> manifest = ReadManifest(files, one.path);
    if (manifest.ok() && manifest->after == step) next = &one;
  }
  return next;
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
      if (committed) found[folder->step] = path;
    }
  }
  std::vector<Committed> list;
  for (const auto& [step, path] : found) list.push_back({step, path});
  return list;
}

absl::StatusOr<std::optional<Committed>> LatestCheckpoint(
    FileSystem& files, const std::string& root) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<Committed> list,
                        ListCheckpoints(files, root));
  if (list.empty()) return std::nullopt;
  FSDP_ASSIGN_OR_RETURN(const int64_t named, NamedLatest(files, root));
  const auto found =
      std::find_if(list.begin(), list.end(),
                   [named](const Committed& one) { return one.step == named; });
  if (found == list.end()) return list.back();
  const Committed* latest = &*found;
  while (const Committed* next = FindNext(files, list, latest->step)) {
    latest = next;
  }
  return *latest;
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
