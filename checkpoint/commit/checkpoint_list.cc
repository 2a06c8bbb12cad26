#include "checkpoint/commit/checkpoint_list.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "checkpoint/commit/manifest.h"

namespace fsdp::checkpoint {
namespace {

// Returns the newest of checkpoints that are committed by manifests, where
// `latest` may be old. Adds the paths of newer ones that are torn to `torn`.
absl::StatusOr<std::optional<Committed>> NewestByManifest(
    FileSystem& files, const std::vector<Committed>& list,
    absl::string_view latest, std::vector<std::string>& torn) {
  std::optional<Committed> given_up;
  for (auto one = list.rbegin(); one != list.rend(); ++one) {
    // One that `latest` names was written whole. If it is damaged nevertheless,
    // whoever loads it has to learn that.
    const absl::Status manifest = latest == StepName(one->step)
                                      ? absl::OkStatus()
                                      : ReadManifest(files, one->path).status();
    if (absl::IsDataLoss(manifest) || absl::IsNotFound(manifest)) {
      torn.push_back(one->path);
      continue;
    }
    FSDP_ASSIGN_OR_RETURN(const bool is_given_up,
                          Exists(files, JoinPath(one->path, kGivenUpName)));
    if (!is_given_up) return *one;
    if (!given_up.has_value()) given_up = *one;
  }
  return given_up;
}

// `names` are those in `root`.
absl::StatusOr<std::vector<Committed>> CommittedOf(
    FileSystem& files, const std::string& root,
    const std::vector<std::string>& names) {
  std::map<int64_t, std::string> found;
  for (const Stage stage : {Stage::kReplaced, Stage::kCommitted}) {
    for (const std::string& name : names) {
      const std::optional<StepFolder> folder = ParseStepName(name);
      if (!folder.has_value() || folder->stage != stage) continue;
      const std::string path = JoinPath(root, name);
      FSDP_ASSIGN_OR_RETURN(const bool committed,
                            Exists(files, JoinPath(path, kManifestName)));
      if (!committed) continue;
      // A damaged checkpoint does not hide the one that it was to replace.
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

}  // namespace

absl::StatusOr<std::string> NamedLatest(FileSystem& files,
                                        const std::string& root) {
  absl::StatusOr<std::string> text =
      ReadFile(files, JoinPath(root, kLatestName), kMaxLatestBytes);
  if (absl::IsNotFound(text.status())) return std::string();
  FSDP_RETURN_IF_ERROR(text.status());
  return std::string(absl::StripSuffix(*text, "\n"));
}

bool IsByManifest(const std::vector<std::string>& names) {
  return std::find(names.begin(), names.end(), kByManifestName) != names.end();
}

absl::StatusOr<std::vector<Committed>> ListCheckpoints(
    FileSystem& files, const std::string& root) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, files.List(root));
  return CommittedOf(files, root, names);
}

absl::StatusOr<std::optional<Committed>> LatestCheckpoint(
    FileSystem& files, const std::string& root) {
  // First, so that the list has what it names, though a run saves meanwhile.
  FSDP_ASSIGN_OR_RETURN(std::string latest, NamedLatest(files, root));
  while (true) {
    FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                          files.List(root));
    FSDP_ASSIGN_OR_RETURN(const auto list, CommittedOf(files, root, names));
    if (list.empty()) return std::nullopt;
    if (IsByManifest(names)) {
      std::vector<std::string> torn;
      return NewestByManifest(files, list, latest, torn);
    }
    // A run may have removed it after it has named another one, or may have
    // committed by manifests until now, where it may be old.
    FSDP_ASSIGN_OR_RETURN(std::string now, NamedLatest(files, root));
    if (now == latest) {
      for (const Committed& one : list) {
        if (latest == StepName(one.step)) return one;
      }
      return list.back();
    }
    latest = std::move(now);
  }
}

absl::StatusOr<std::vector<std::string>> TornCheckpoints(
    FileSystem& files, const std::string& root) {
  // In the order of LatestCheckpoint(), and for its reason.
  FSDP_ASSIGN_OR_RETURN(const std::string latest, NamedLatest(files, root));
  FSDP_ASSIGN_OR_RETURN(const auto list, ListCheckpoints(files, root));
  std::vector<std::string> torn;
  FSDP_RETURN_IF_ERROR(NewestByManifest(files, list, latest, torn).status());
  return torn;
}

namespace {

constexpr absl::string_view kPrefix = "step-";
constexpr absl::string_view kIncomplete = ".incomplete-";
constexpr absl::string_view kSuffixes[] = {"", kIncomplete, ".replaced",
                                           ".deleted"};

bool IsToken(absl::string_view text) {
  return !text.empty() &&
         text.find_first_not_of("0123456789abcdef") == text.npos;
}

}  // namespace

std::string StepName(int64_t step, Stage stage) {
  FSDP_CHECK(stage != Stage::kIncomplete);
  return absl::StrCat(kPrefix, step, kSuffixes[static_cast<int>(stage)]);
}

std::string StepPath(absl::string_view root, int64_t step, Stage stage) {
  return absl::StrCat(root, "/", StepName(step, stage));
}

std::string WrittenPath(absl::string_view root, int64_t step,
                        absl::string_view token, CommitBy commit_by) {
  if (commit_by == CommitBy::kManifest) return StepPath(root, step);
  FSDP_CHECK(IsToken(token));
  return absl::StrCat(root, "/", kPrefix, step, kIncomplete, token);
}

std::optional<StepFolder> ParseStepName(absl::string_view name) {
  absl::string_view digits = name;
  if (!absl::ConsumePrefix(&digits, kPrefix)) return std::nullopt;
  digits = digits.substr(0, digits.find('.'));
  absl::string_view suffix = name.substr(kPrefix.size() + digits.size());
  StepFolder found;
  if (!absl::SimpleAtoi(digits, &found.step) || found.step < 0 ||
      absl::StrCat(found.step) != digits) {
    return std::nullopt;
  }
  if (absl::ConsumePrefix(&suffix, kIncomplete)) {
    found.stage = Stage::kIncomplete;
    return IsToken(suffix) ? std::optional<StepFolder>(found) : std::nullopt;
  }
  for (const Stage stage :
       {Stage::kCommitted, Stage::kReplaced, Stage::kDeleted}) {
    found.stage = stage;
    if (suffix == kSuffixes[static_cast<int>(stage)]) return found;
  }
  return std::nullopt;
}

}  // namespace fsdp::checkpoint
