#include "tools/checkpoint/ls.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/checkpoint_names.h"
#include "checkpoint/commit/manifest.h"
#include "tools/checkpoint/source.h"
#include "tools/checkpoint/text.h"

namespace fsdp::checkpoint::tool {
namespace {

struct Size {
  int64_t files = 0;
  int64_t bytes = 0;
};

// Of what is in a folder and the folders in it.
absl::Status AddSize(FileSystem& files, const std::string& folder, int depth,
                     Size& size) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                        files.List(folder));
  for (const std::string& name : names) {
    const std::string path = JoinPath(folder, name);
    const absl::StatusOr<FileInfo> info = files.Stat(path);
    // A run may be at work here.
    if (absl::IsNotFound(info.status())) continue;
    FSDP_RETURN_IF_ERROR(info.status());
    if (info->kind == FileInfo::Kind::kFolder && depth == 0) {
      FSDP_RETURN_IF_ERROR(AddSize(files, path, depth + 1, size));
    } else {
      ++size.files;
      size.bytes += info->bytes;
    }
  }
  return absl::OkStatus();
}

// What a run's folder says of all.
struct RunState {
  bool by_manifest = false;
  std::optional<int64_t> latest;
};

constexpr char kIncomplete[] =
    "incomplete: being written, or left by a run that ended";

std::string MarkOf(FileSystem& files, const std::string& path,
                   const StepFolder& folder, const RunState& run) {
  switch (folder.stage) {
    case Stage::kIncomplete:
      return kIncomplete;
    case Stage::kDeleted:
      return "partly removed: the next run removes the rest";
    case Stage::kReplaced:
      return "replaced by one of the same step";
    case Stage::kCommitted:
      break;
  }
  const absl::Status manifest = ReadManifest(files, path).status();
  if (run.by_manifest && absl::IsNotFound(manifest)) return kIncomplete;
  if (!manifest.ok()) return absl::StrCat("damaged: ", manifest.message());
  return run.latest == folder.step ? "latest" : "";
}

std::string TimeText(const std::optional<absl::Time>& time) {
  if (!time.has_value()) return "?";
  return absl::FormatTime("%Y-%m-%d %H:%M:%S", *time, absl::LocalTimeZone());
}

absl::StatusOr<std::string> ListRun(FileSystem& files, const std::string& root,
                                    const std::vector<std::string>& names,
                                    const ModifiedAt& modified_at) {
  FSDP_ASSIGN_OR_RETURN(const auto latest, LatestCheckpoint(files, root));
  RunState run;
  run.by_manifest = IsByManifest(names);
  if (latest.has_value()) run.latest = latest->step;
  std::vector<std::pair<StepFolder, std::string>> folders;
  for (const std::string& name : names) {
    const std::optional<StepFolder> folder = ParseStepName(name);
    if (folder.has_value()) folders.emplace_back(*folder, name);
  }
  std::sort(folders.begin(), folders.end(), [](const auto& a, const auto& b) {
    return std::make_pair(a.first.step, a.first.stage) <
           std::make_pair(b.first.step, b.first.stage);
  });
  std::vector<std::vector<std::string>> rows = {
      {"step", "files", "size", "written", ""}};
  for (const auto& [folder, name] : folders) {
    const std::string path = JoinPath(root, name);
    Size size;
    FSDP_RETURN_IF_ERROR(AddSize(files, path, 0, size));
    const bool is_whole = folder.stage == Stage::kCommitted;
    rows.push_back(
        {absl::StrCat(folder.step), Thousands(size.files), SizeText(size.bytes),
         TimeText(modified_at(is_whole ? JoinPath(path, kManifestName) : path)),
         MarkOf(files, path, folder, run)});
  }
  return absl::StrCat(
      Printable(root), ": checkpoints of a run\n",
      folders.empty() ? "  none yet\n" : Columns(rows, "rrrll"));
}

}  // namespace

absl::StatusOr<std::string> List(FileSystem& files, const std::string& path,
                                 const ModifiedAt& modified_at) {
  FSDP_ASSIGN_OR_RETURN(const bool is_folder, IsFolder(files, path));
  if (is_folder) {
    FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                          files.List(path));
    if (IsRunFolder(names)) return ListRun(files, path, names, modified_at);
  }
  FSDP_ASSIGN_OR_RETURN(const Source source, OpenSource(files, path));
  int64_t bytes = 0;
  for (const StoredFile& file : source.catalog.files()) bytes += file.bytes;
  const Catalog& catalog = source.catalog;
  return absl::StrCat(
      Printable(path), ": ", NameOf(source.format),
      source.manifest.has_value()
          ? absl::StrCat(" of step ", source.manifest->step)
          : "",
      ", ", Count(static_cast<int64_t>(catalog.tensors().size()), "tensor"),
      " in ", Count(static_cast<int64_t>(catalog.files().size()), "file"), ", ",
      SizeText(bytes), "\n");
}

}  // namespace fsdp::checkpoint::tool
