#include "checkpoint/commit/by_manifest.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "checkpoint/commit/checkpoint_list.h"

namespace fsdp::checkpoint {
namespace {

// For people: its name says it all.
constexpr char kByManifestText[] =
    "A folder step-N in here is a checkpoint if it has a manifest.json.\n";
constexpr char kGivenUpText[] =
    "The run has gone on from an older checkpoint.\n";

// What is found done may be what a run did that failed before it had synced:
// all is synced that later changes rest on, whoever has made it.

// Lowest first: the newest of the others is the same until the last is marked.
absl::Status GiveUpAbove(FileSystem& files, const std::string& root,
                         int64_t step) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<Committed> list,
                        ListCheckpoints(files, root));
  for (const Committed& one : list) {
    if (one.step <= step) continue;
    const std::string mark = JoinPath(one.path, kGivenUpName);
    FSDP_ASSIGN_OR_RETURN(const bool marked, Exists(files, mark));
    if (!marked) FSDP_RETURN_IF_ERROR(WriteNewFile(files, mark, kGivenUpText));
    FSDP_RETURN_IF_ERROR(files.SyncFolder(one.path));
  }
  return absl::OkStatus();
}

// OK where there is none.
absl::Status RemoveManifest(FileSystem& files, const std::string& path) {
  const std::string manifest = JoinPath(path, kManifestName);
  FSDP_ASSIGN_OR_RETURN(const bool exists, Exists(files, manifest));
  if (exists) FSDP_RETURN_IF_ERROR(files.RemoveFile(manifest));
  const absl::Status synced = files.SyncFolder(path);
  // The folder may have gone with it.
  return absl::IsNotFound(synced) ? absl::OkStatus() : synced;
}

absl::Status WriteManifest(FileSystem& files, const std::string& path,
                           const Manifest& manifest) {
  FSDP_RETURN_IF_ERROR(WriteNewFile(files, JoinPath(path, kManifestName),
                                    FormatManifest(manifest)));
  return files.SyncFolder(path);
}

absl::Status WriteLatest(FileSystem& files, const std::string& root,
                         int64_t step) {
  const std::string path = JoinPath(root, kLatestName);
  FSDP_ASSIGN_OR_RETURN(const bool exists, Exists(files, path));
  if (exists) FSDP_RETURN_IF_ERROR(files.RemoveFile(path));
  FSDP_RETURN_IF_ERROR(
      WriteNewFile(files, path, absl::StrCat(StepName(step), "\n")));
  return files.SyncFolder(root);
}

// Removes `latest` if it names the folder `path`.
absl::Status ForgetLatest(FileSystem& files, const std::string& path) {
  const std::string root = FolderOf(path);
  FSDP_ASSIGN_OR_RETURN(const std::string latest, NamedLatest(files, root));
  const bool names_it = !latest.empty() && JoinPath(root, latest) == path;
  if (names_it) {
    FSDP_RETURN_IF_ERROR(files.RemoveFile(JoinPath(root, kLatestName)));
  }
  return files.SyncFolder(root);
}

}  // namespace

absl::Status BeginByManifest(FileSystem& files, const std::string& root) {
  FSDP_ASSIGN_OR_RETURN(const std::optional<Committed> latest,
                        LatestCheckpoint(files, root));
  if (latest.has_value()) {
    FSDP_RETURN_IF_ERROR(GiveUpAbove(files, root, latest->step));
  }
  FSDP_RETURN_IF_ERROR(
      WriteNewFile(files, JoinPath(root, kByManifestName), kByManifestText));
  return files.SyncFolder(root);
}

absl::Status RemoveUnfinished(FileSystem& files, const std::string& root) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> torn,
                        TornCheckpoints(files, root));
  for (const std::string& path : torn) {
    FSDP_RETURN_IF_ERROR(RemoveByManifest(files, path));
  }
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, files.List(root));
  for (const std::string& name : names) {
    const std::optional<StepFolder> folder = ParseStepName(name);
    if (!folder.has_value() || folder->stage != Stage::kCommitted) continue;
    const std::string path = JoinPath(root, name);
    FSDP_ASSIGN_OR_RETURN(const bool committed,
                          Exists(files, JoinPath(path, kManifestName)));
    if (!committed) FSDP_RETURN_IF_ERROR(RemoveByManifest(files, path));
  }
  return absl::OkStatus();
}

absl::Status RemoveByManifest(FileSystem& files, const std::string& path) {
  // Whoever finds a torn manifest of it later must not take it for whole.
  FSDP_RETURN_IF_ERROR(ForgetLatest(files, path));
  FSDP_RETURN_IF_ERROR(RemoveManifest(files, path));
  FSDP_RETURN_IF_ERROR(RemoveTree(files, path));
  return files.SyncFolder(FolderOf(path));
}

absl::Status CommitByManifest(FileSystem& files, const std::string& root,
                              const Manifest& manifest) {
  const std::string path = StepPath(root, manifest.step);
  // What the manifest vouches for is there before it, after a loss of power,
  // too.
  FSDP_RETURN_IF_ERROR(files.SyncFolder(path));
  FSDP_RETURN_IF_ERROR(files.SyncFolder(root));
  FSDP_RETURN_IF_ERROR(GiveUpAbove(files, root, manifest.step));
  absl::Status written = WriteManifest(files, path, manifest);
  if (!written.ok()) {
    if (RemoveManifest(files, path).ok()) return written;
    return MayBeSaved(written, manifest.step);
  }
  absl::Status named = WriteLatest(files, root, manifest.step);
  if (named.ok()) return named;
  return absl::Status(
      named.code(),
      absl::StrCat("step ", manifest.step, " is saved, but ", kLatestName,
                   " could not be written: ", named.message()));
}

absl::Status MayBeSaved(const absl::Status& why, int64_t step) {
  return absl::Status(why.code(), absl::StrCat(why.message(), "; step ", step,
                                               " may be saved all the same"));
}

}  // namespace fsdp::checkpoint
