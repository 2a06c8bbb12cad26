#include "tools/checkpoint/verify.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/manifest.h"
#include "tools/checkpoint/source.h"
#include "tools/checkpoint/text.h"

namespace fsdp::checkpoint::tool {
namespace {

void AddProblem(absl::string_view text, VerifyResult& result) {
  ++result.problems;
  absl::StrAppend(&result.text, "  ", Printable(text), "\n");
}

// Whether the files have what they say.
void CheckStructure(FileSystem& files, const std::string& path,
                    VerifyResult& result) {
  const absl::StatusOr<Source> source = OpenSource(files, path);
  if (!source.ok()) AddProblem(source.status().message(), result);
}

// Its manifest, its bytes, and its structure where the bytes are sound.
absl::Status VerifyCheckpoint(FileSystem& files, const std::string& path,
                              const OnBytes& progress, VerifyResult& result) {
  absl::StrAppend(&result.text, Printable(path), "\n");
  const absl::StatusOr<Manifest> manifest = ReadManifest(files, path);
  if (!manifest.ok()) {
    AddProblem(manifest.status().message(), result);
    return absl::OkStatus();
  }
  FSDP_ASSIGN_OR_RETURN(const std::vector<Problem> problems,
                        VerifyFiles(files, path, *manifest, progress));
  for (const Problem& problem : problems) AddProblem(problem.text, result);
  if (problems.empty()) CheckStructure(files, path, result);
  return absl::OkStatus();
}

absl::Status VerifyRun(FileSystem& files, const std::string& root,
                       const std::vector<std::string>& names,
                       const OnBytes& progress, VerifyResult& result) {
  std::vector<int64_t> steps;
  for (const std::string& name : names) {
    const std::optional<StepFolder> folder = ParseStepName(name);
    if (!folder.has_value() || folder->stage != Stage::kCommitted) continue;
    FSDP_ASSIGN_OR_RETURN(
        const bool has_manifest,
        Exists(files, JoinPath(JoinPath(root, name), kManifestName)));
    // Where its name alone commits it, it has lost one.
    if (has_manifest || !IsByManifest(names)) steps.push_back(folder->step);
  }
  std::sort(steps.begin(), steps.end());
  for (const int64_t step : steps) {
    FSDP_RETURN_IF_ERROR(
        VerifyCheckpoint(files, StepPath(root, step), progress, result));
  }
  if (!steps.empty()) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat(root, " has no checkpoint"));
}

absl::Status VerifyAny(FileSystem& files, const std::string& path,
                       const OnBytes& progress, VerifyResult& result) {
  FSDP_ASSIGN_OR_RETURN(const bool is_folder, IsFolder(files, path));
  if (is_folder) {
    FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                          files.List(path));
    if (IsRunFolder(names)) {
      return VerifyRun(files, path, names, progress, result);
    }
    if (std::find(names.begin(), names.end(), kManifestName) != names.end()) {
      return VerifyCheckpoint(files, path, progress, result);
    }
  }
  absl::StrAppend(&result.text, Printable(path),
                  ": no manifest, so that only its structure can be checked\n");
  CheckStructure(files, path, result);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<VerifyResult> Verify(FileSystem& files, const std::string& path,
                                    const OnBytes& progress) {
  VerifyResult result;
  FSDP_RETURN_IF_ERROR(VerifyAny(files, path, progress, result));
  absl::StrAppend(&result.text,
                  result.problems == 0 ? std::string("sound")
                                       : Count(result.problems, "problem"),
                  "\n");
  return result;
}

}  // namespace fsdp::checkpoint::tool
