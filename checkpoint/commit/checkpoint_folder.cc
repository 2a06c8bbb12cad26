#include "checkpoint/commit/checkpoint_folder.h"

#include <algorithm>
#include <optional>
#include <random>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"

namespace fsdp::checkpoint {
namespace {

// Describes this process to those whom the lock refuses.
std::string Holder() {
  return absl::StrCat(ThisProcess(), ", since ",
                      absl::FormatTime(absl::Now(), absl::UTCTimeZone()));
}

// Returns 64 random bits as text, so that no two runs have the same token.
std::string RandomToken() {
  std::random_device random;
  const uint64_t high = random();
  return absl::StrCat(absl::Hex(high << 32 | random(), absl::kZeroPad16));
}

// Makes the folder and syncs its parent, even if the folder was there: a run
// that made it may have failed before it could sync.
absl::Status MakeRoot(FileSystem& files, const std::string& root) {
  FSDP_ASSIGN_OR_RETURN(const bool made, files.MakeFolder(root));
  const std::string parent = FolderOf(root);
  // A parent that this process may not look into cannot be synced.
  if (!made && absl::IsPermissionDenied(files.List(parent).status())) {
    return absl::OkStatus();
  }
  return Annotate(files.SyncFolder(parent), absl::StrCat("make folder ", root));
}

// --- By manifest: nothing here renames, locks or overwrites ------------------

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
  FSDP_ASSIGN_OR_RETURN(const auto list, ListCheckpoints(files, root));
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
absl::Status RemoveIfThere(FileSystem& files, const std::string& path) {
  FSDP_ASSIGN_OR_RETURN(const bool exists, Exists(files, path));
  return exists ? files.RemoveFile(path) : absl::OkStatus();
}

// OK where there is none.
absl::Status RemoveManifest(FileSystem& files, const std::string& path) {
  FSDP_RETURN_IF_ERROR(RemoveIfThere(files, JoinPath(path, kManifestName)));
  const absl::Status synced = files.SyncFolder(path);
  // The folder may have gone with it.
  return absl::IsNotFound(synced) ? absl::OkStatus() : synced;
}

absl::Status WriteLatest(FileSystem& files, const std::string& root,
                         int64_t step) {
  const std::string path = JoinPath(root, kLatestName);
  FSDP_RETURN_IF_ERROR(RemoveIfThere(files, path));
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

// Removes the folder of a step, if there is one. From the first change on it is
// no checkpoint; after OK nothing of it is left.
absl::Status RemoveByManifest(FileSystem& files, const std::string& path) {
  // Whoever finds a torn manifest of it later must not take it for whole.
  FSDP_RETURN_IF_ERROR(ForgetLatest(files, path));
  FSDP_RETURN_IF_ERROR(RemoveManifest(files, path));
  FSDP_RETURN_IF_ERROR(RemoveTree(files, path));
  return files.SyncFolder(FolderOf(path));
}

// Removes the folders of steps that have no manifest, or one that was being
// written when a run died.
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
    if (committed) continue;
    FSDP_RETURN_IF_ERROR(ForgetLatest(files, path));
    FSDP_RETURN_IF_ERROR(RemoveManifest(files, path));
    RemoveTree(files, path).IgnoreError();
  }
  return absl::OkStatus();
}

// Makes StepPath(root, manifest.step) a checkpoint and the newest one: higher
// steps are marked as given up. The files that the manifest names are there and
// synced. After an error it is no checkpoint, unless the text says so.
absl::Status CommitByManifest(FileSystem& files, const std::string& root,
                              const Manifest& manifest) {
  const std::string path = StepPath(root, manifest.step);
  // What the manifest vouches for is there before it, after a loss of power,
  // too.
  FSDP_RETURN_IF_ERROR(files.SyncFolder(path));
  FSDP_RETURN_IF_ERROR(files.SyncFolder(root));
  FSDP_RETURN_IF_ERROR(GiveUpAbove(files, root, manifest.step));
  absl::Status written = WriteNewFile(files, JoinPath(path, kManifestName),
                                      FormatManifest(manifest));
  if (written.ok()) written = files.SyncFolder(path);
  if (!written.ok()) {
    if (RemoveManifest(files, path).ok()) return written;
    return MayBeSaved(written, manifest.step);
  }
  return Annotate(WriteLatest(files, root, manifest.step),
                  absl::StrCat("step ", manifest.step, " is saved, but ",
                               kLatestName, " could not be written"));
}

}  // namespace

absl::Status MayBeSaved(const absl::Status& why, int64_t step) {
  return absl::Status(why.code(), absl::StrCat(why.message(), "; step ", step,
                                               " may be saved all the same"));
}

CheckpointFolder::CheckpointFolder(FileSystem& files, std::string root,
                                   CommitBy commit_by, FileLock lock)
    : files_(files),
      root_(std::move(root)),
      commit_by_(commit_by),
      lock_(std::move(lock)),
      token_(RandomToken()) {}

absl::StatusOr<std::unique_ptr<CheckpointFolder>> CheckpointFolder::Claim(
    FileSystem& files, const std::string& root, CommitBy commit_by) {
  FSDP_RETURN_IF_ERROR(MakeRoot(files, root));
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, files.List(root));
  const std::string marker = JoinPath(root, kMarkerName);
  const bool marked =
      std::find(names.begin(), names.end(), kMarkerName) != names.end();
  if (!marked && !names.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "checkpoints in ", root, ": there is something else in it (", names[0],
        "): name a new or an empty folder; a folder of checkpoints that was "
        "copied needs its hidden file ",
        kMarkerName, " as well"));
  }
  FileLock lock;
  if (commit_by == CommitBy::kRename) {
    FSDP_ASSIGN_OR_RETURN(lock, files.Lock(marker, Holder()));
  } else if (names.empty()) {
    // A folder of ours that is not empty has its marker.
    FSDP_RETURN_IF_ERROR(
        WriteNewFile(files, marker, absl::StrCat(Holder(), "\n")));
  }
  // The marker is on the disk before anything that it has to explain.
  FSDP_RETURN_IF_ERROR(files.SyncFolder(root));
  auto folder = absl::WrapUnique(
      new CheckpointFolder(files, root, commit_by, std::move(lock)));
  FSDP_RETURN_IF_ERROR(folder->RemoveLeftovers());
  FSDP_RETURN_IF_ERROR(folder->SettleCommitBy());
  return folder;
}

absl::Status CheckpointFolder::RemoveLeftovers() {
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                        files_.List(root_));
  // The folder that would have been committed has to be there still.
  FSDP_RETURN_IF_ERROR(SettleNext());
  for (const std::string& name : names) {
    const std::string path = JoinPath(root_, name);
    const std::optional<StepFolder> folder = ParseStepName(name);
    if (!folder.has_value()) continue;
    if (folder->stage == Stage::kIncomplete ||
        folder->stage == Stage::kDeleted) {
      // Without a manifest, what cannot be removed only takes room.
      FSDP_RETURN_IF_ERROR(RemoveManifest(files_, path));
      RemoveTree(files_, path).IgnoreError();
    } else if (folder->stage == Stage::kReplaced) {
      FSDP_RETURN_IF_ERROR(SettleReplaced(folder->step));
    }
  }
  if (IsByManifest(names)) {
    FSDP_RETURN_IF_ERROR(RemoveUnfinished(files_, root_));
  }
  return files_.SyncFolder(root_);
}

absl::Status CheckpointFolder::SettleCommitBy() {
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                        files_.List(root_));
  if (IsByManifest(names) == by_manifest()) return absl::OkStatus();
  FSDP_ASSIGN_OR_RETURN(const auto latest, LatestCheckpoint(files_, root_));
  if (by_manifest()) {
    if (latest.has_value()) {
      FSDP_RETURN_IF_ERROR(GiveUpAbove(files_, root_, latest->step));
    }
    FSDP_RETURN_IF_ERROR(WriteNewFile(files_, JoinPath(root_, kByManifestName),
                                      kByManifestText));
    return files_.SyncFolder(root_);
  }
  // By manifest `latest` may be old; from here on it has to be right.
  if (latest.has_value()) {
    FSDP_RETURN_IF_ERROR(WriteNext(latest->step));
    FSDP_RETURN_IF_ERROR(Announce());
  }
  FSDP_RETURN_IF_ERROR(files_.RemoveFile(JoinPath(root_, kByManifestName)));
  return files_.SyncFolder(root_);
}

absl::Status CheckpointFolder::SettleReplaced(int64_t step) {
  const std::string old = StepPath(root_, step, Stage::kReplaced);
  const std::string live = StepPath(root_, step);
  FSDP_ASSIGN_OR_RETURN(const bool replaced, Exists(files_, old));
  if (!replaced) return absl::OkStatus();
  FSDP_ASSIGN_OR_RETURN(const bool exists, Exists(files_, live));
  if (exists) {
    absl::Status sound = ReadManifest(files_, live).status();
    if (sound.ok()) return Remove(step, old);
    // Only a checkpoint that is known to be damaged makes room for the old one.
    if (!absl::IsDataLoss(sound) && !absl::IsNotFound(sound)) return sound;
    FSDP_RETURN_IF_ERROR(Remove(step, live));
  }
  FSDP_RETURN_IF_ERROR(files_.Rename(old, live));
  return files_.SyncFolder(root_);
}

absl::StatusOr<std::string> CheckpointFolder::Begin(int64_t step,
                                                    bool overwrite) {
  if (step < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("save step ", step, " in ", root_, ": no such step"));
  }
  FSDP_RETURN_IF_ERROR(SettleReplaced(step));
  const std::string live = StepPath(root_, step);
  FSDP_ASSIGN_OR_RETURN(
      const bool exists,
      Exists(files_, by_manifest() ? JoinPath(live, kManifestName) : live));
  if (exists && !overwrite) {
    return absl::AlreadyExistsError(absl::StrCat(
        "save step ", step, ": ", live,
        " is there already; remove it, save with overwrite, or name another "
        "folder for this run"));
  }
  std::string path = PathToWrite(step);
  if (by_manifest()) {
    FSDP_RETURN_IF_ERROR(RemoveByManifest(files_, path));
  } else if (undiscarded_.count(step) > 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "save step ", step, ": ", path,
        " has what is left of a save that failed and could not be removed; "
        "save another step, or start the run again"));
  }
  FSDP_RETURN_IF_ERROR(files_.MakeFolder(path).status());
  begun_[step] = overwrite;
  return path;
}

absl::Status CheckpointFolder::Commit(int64_t step, const Manifest& manifest) {
  if (begun_.count(step) == 0 || manifest.step != step) {
    return absl::FailedPreconditionError(absl::StrCat(
        "commit step ", step, " in ", root_,
        ": it was not begun, or the manifest is of step ", manifest.step));
  }
  const std::string path = PathToWrite(step);
  std::set<std::string> folders;
  for (const auto& [name, sums] : manifest.files) {
    FSDP_RETURN_IF_ERROR(CheckFileName(name));
    if (FolderOf(name) != ".") folders.insert(FolderOf(name));
  }
  FSDP_ASSIGN_OR_RETURN(const std::vector<Problem> problems,
                        CompareSizes(files_, path, manifest));
  FSDP_RETURN_IF_ERROR(ProblemsStatus(path, problems));
  for (const std::string& folder : folders) {
    FSDP_RETURN_IF_ERROR(files_.SyncFolder(JoinPath(path, folder)));
  }
  if (!by_manifest()) return CommitByRename(manifest);
  absl::Status committed = CommitByManifest(files_, root_, manifest);
  FSDP_ASSIGN_OR_RETURN(
      const bool is_there,
      Exists(files_, JoinPath(StepPath(root_, step), kManifestName)));
  // A committed checkpoint is not for Discard() to remove.
  if (is_there) begun_.erase(step);
  return committed;
}

absl::Status CheckpointFolder::CommitByRename(const Manifest& manifest) {
  const int64_t step = manifest.step;
  const std::string path = PathToWrite(step);
  const std::string live = StepPath(root_, step);
  FSDP_RETURN_IF_ERROR(ReplaceFile(files_, JoinPath(path, kManifestName),
                                   FormatManifest(manifest)));
  FSDP_RETURN_IF_ERROR(WriteNext(step));
  if (begun_[step]) {
    FSDP_RETURN_IF_ERROR(SettleReplaced(step));
    FSDP_ASSIGN_OR_RETURN(const bool exists, Exists(files_, live));
    if (exists) {
      FSDP_RETURN_IF_ERROR(
          files_.Rename(live, StepPath(root_, step, Stage::kReplaced)));
      FSDP_RETURN_IF_ERROR(files_.SyncFolder(root_));
    }
  }
  FSDP_RETURN_IF_ERROR(files_.Rename(path, live));
  begun_.erase(step);
  absl::Status announced = Announce();
  if (!announced.ok()) {
    absl::Status undone = Remove(step, live);
    undone.Update(SettleReplaced(step));
    return undone.ok() ? announced : MayBeSaved(announced, step);
  }
  return Annotate(
      SettleReplaced(step),
      absl::StrCat("step ", step,
                   " is saved, but the one it replaces could not be removed"));
}

absl::Status CheckpointFolder::WriteNext(int64_t step) {
  FSDP_RETURN_IF_ERROR(WriteFile(files_, JoinPath(root_, kNextName),
                                 absl::StrCat(StepName(step), "\n")));
  return files_.SyncFolder(root_);
}

absl::Status CheckpointFolder::Announce() {
  FSDP_RETURN_IF_ERROR(files_.SyncFolder(root_));
  FSDP_RETURN_IF_ERROR(
      files_.Rename(JoinPath(root_, kNextName), JoinPath(root_, kLatestName)));
  return files_.SyncFolder(root_);
}

absl::Status CheckpointFolder::SettleNext() {
  const std::string path = JoinPath(root_, kNextName);
  FSDP_ASSIGN_OR_RETURN(const bool exists, Exists(files_, path));
  if (!exists) return absl::OkStatus();
  const absl::StatusOr<std::string> text =
      ReadFile(files_, path, kMaxLatestBytes);
  const std::optional<StepFolder> next =
      text.ok() ? ParseStepName(absl::StripSuffix(*text, "\n")) : std::nullopt;
  if (!next.has_value() || next->stage != Stage::kCommitted) {
    return files_.RemoveFile(path);
  }
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                        files_.List(root_));
  for (const std::string& name : names) {
    const std::optional<StepFolder> folder = ParseStepName(name);
    if (!folder.has_value() || folder->step != next->step ||
        folder->stage != Stage::kIncomplete) {
      continue;
    }
    // It is written but not renamed. Without a manifest it was not about to be
    // committed: ranks of a run that was killed may still write there.
    FSDP_ASSIGN_OR_RETURN(
        const bool has_manifest,
        Exists(files_, JoinPath(JoinPath(root_, name), kManifestName)));
    if (has_manifest) return files_.RemoveFile(path);
  }
  const bool committed = ReadManifest(files_, StepPath(root_, next->step)).ok();
  return committed ? Announce() : files_.RemoveFile(path);
}

absl::Status CheckpointFolder::Discard(int64_t step) {
  const bool was_begun = begun_.erase(step) > 0;
  if (by_manifest()) {
    // If nothing was begun, another save has made what is there.
    return was_begun ? RemoveByManifest(files_, PathToWrite(step))
                     : absl::OkStatus();
  }
  // The folder shows that the step was not committed, so that this comes first.
  absl::Status removed = SettleNext();
  removed.Update(RemoveTree(files_, PathToWrite(step)));
  if (removed.ok()) {
    undiscarded_.erase(step);
  } else {
    undiscarded_.insert(step);
  }
  return removed;
}

absl::Status CheckpointFolder::Remove(int64_t step, const std::string& path) {
  if (by_manifest()) return RemoveByManifest(files_, path);
  const std::string deleted = StepPath(root_, step, Stage::kDeleted);
  FSDP_RETURN_IF_ERROR(RemoveTree(files_, deleted));
  FSDP_RETURN_IF_ERROR(files_.Rename(path, deleted));
  FSDP_RETURN_IF_ERROR(files_.SyncFolder(root_));
  // It is no checkpoint any more.
  unremoved_.Update(RemoveTree(files_, deleted));
  return absl::OkStatus();
}

absl::Status CheckpointFolder::RemoveDeleted() {
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                        files_.List(root_));
  absl::Status removed;
  for (const std::string& name : names) {
    const std::optional<StepFolder> folder = ParseStepName(name);
    if (!folder.has_value() || folder->stage != Stage::kDeleted) continue;
    removed.Update(RemoveTree(files_, JoinPath(root_, name)));
  }
  return removed;
}

absl::StatusOr<std::vector<int64_t>> CheckpointFolder::Prune(
    const Retention& retention) {
  FSDP_ASSIGN_OR_RETURN(auto list, ListCheckpoints(files_, root_));
  FSDP_ASSIGN_OR_RETURN(const auto latest, LatestCheckpoint(files_, root_));
  std::vector<int64_t> removed;
  absl::Status status = std::exchange(unremoved_, absl::OkStatus());
  status.Update(RemoveDeleted());
  const auto ignored = [&retention](const Committed& one) {
    return retention.ignore.count(one.step) > 0;
  };
  list.erase(std::remove_if(list.begin(), list.end(), ignored), list.end());
  const auto count = static_cast<int64_t>(list.size());
  const int64_t kept = retention.keep_last > 0 ? retention.keep_last : count;
  for (int64_t i = 0; i < count - kept; ++i) {
    const auto& [step, path] = list[i];
    const bool every =
        retention.keep_every > 0 && step % retention.keep_every == 0;
    if (every || retention.keep.count(step) > 0 ||
        (latest.has_value() && latest->step == step)) {
      continue;
    }
    status.Update(Remove(step, path));
    removed.push_back(step);
  }
  status.Update(std::exchange(unremoved_, absl::OkStatus()));
  FSDP_RETURN_IF_ERROR(status);
  return removed;
}

}  // namespace fsdp::checkpoint
