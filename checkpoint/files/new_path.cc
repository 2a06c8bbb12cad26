#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint {
namespace {

std::string WithoutSlashes(absl::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  return std::string(path);
}

}  // namespace

NewPath::NewPath(FileSystem& files, absl::string_view path, Kind kind)
    : files_(files),
      path_(WithoutSlashes(path)),
      incomplete_(absl::StrCat(path_, ".incomplete")),
      lock_path_(absl::StrCat(incomplete_, ".lock")),
      kind_(kind) {}

NewPath::~NewPath() { Discard(); }

absl::Status NewPath::Claim(absl::string_view what) {
  FSDP_CHECK(lock_ == nullptr);
  // A path that is taken is refused before anything on the disk changes.
  FSDP_RETURN_IF_ERROR(CheckIsFree());
  auto lock =
      files_.Lock(lock_path_, absl::StrCat(ThisProcess(), ", which ", what));
  if (absl::IsNotFound(lock.status())) {
    return absl::NotFoundError(absl::StrCat(
        path_, " cannot be made: there is no folder ", FolderOf(path_)));
  }
  FSDP_ASSIGN_OR_RETURN(lock_, std::move(lock));
  const absl::Status begun = Begin();
  if (!begun.ok()) Discard();
  return begun;
}

absl::Status NewPath::Begin() {
  // The process that had the lock may have committed.
  FSDP_RETURN_IF_ERROR(CheckIsFree());
  FSDP_RETURN_IF_ERROR(RemoveIncomplete());
  if (kind_ != Kind::kFolder) return absl::OkStatus();
  return files_.MakeFolder(incomplete_).status();
}

absl::Status NewPath::Commit() {
  FSDP_CHECK(lock_ != nullptr);
  absl::Status renamed = Rename();
  if (!renamed.ok()) {
    Discard();
    return renamed;
  }
  Release();
  // If this fails, the lock's file may be back after a loss of power, which is
  // no reason to fail.
  files_.SyncFolder(FolderOf(path_)).IgnoreError();
  return absl::OkStatus();
}

absl::Status NewPath::Rename() {
  if (kind_ == Kind::kFolder) {
    FSDP_RETURN_IF_ERROR(files_.SyncFolder(incomplete_));
  } else {
    FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                          files_.OpenForReading(incomplete_, Caching::kCached));
    FSDP_RETURN_IF_ERROR(file->Sync());
  }
  FSDP_RETURN_IF_ERROR(CheckIsFree());
  FSDP_ASSIGN_OR_RETURN(const bool replaces, Exists(files_, path_));
  FSDP_RETURN_IF_ERROR(files_.Rename(incomplete_, path_));
  const absl::Status synced = files_.SyncFolder(FolderOf(path_));
  if (synced.ok()) return absl::OkStatus();
  if (!replaces) return UndoRename(synced);
  Release();
  return Annotate(synced,
                  absl::StrCat(path_,
                               " is replaced, but the file that was there may "
                               "be back after a loss of power"));
}

absl::Status NewPath::UndoRename(const absl::Status& why) {
  if (!files_.Rename(path_, incomplete_).ok()) {
    Release();
    return Annotate(
        why, absl::StrCat(path_,
                          " is there and whole, but may be gone after a loss "
                          "of power"));
  }
  // While the disk may still have the output under its name, it stays whole.
  if (!files_.SyncFolder(FolderOf(path_)).ok()) Release();
  return Annotate(why, absl::StrCat(path_, " is not made"));
}

void NewPath::Discard() {
  if (lock_ == nullptr) return;
  // The error that the caller returns says more than one of this.
  RemoveIncomplete().IgnoreError();
  Release();
}

absl::Status NewPath::CheckIsFree() {
  if (path_.empty()) {
    return absl::InvalidArgumentError(
        "\"\" is no path to write to: name a file or a folder");
  }
  const absl::StatusOr<FileInfo> info = files_.Stat(path_);
  if (absl::IsNotFound(info.status())) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(info.status());
  if (kind_ != Kind::kReplacedFile) {
    return absl::AlreadyExistsError(
        absl::StrCat(path_,
                     " is there already and is not written over: name another "
                     "one, or move that one away"));
  }
  if (info->kind != FileInfo::Kind::kFolder) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(path_, " is a folder: name a file"));
}

absl::Status NewPath::RemoveIncomplete() {
  const absl::StatusOr<FileInfo> info = files_.Stat(incomplete_);
  if (absl::IsNotFound(info.status())) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(info.status());
  return info->kind == FileInfo::Kind::kFolder ? RemoveTree(files_, incomplete_)
                                               : files_.RemoveFile(incomplete_);
}

// Removes the file before it unlocks it: whoever has opened it finds it gone.
void NewPath::Release() {
  files_.RemoveFile(lock_path_).IgnoreError();
  lock_.reset();
}

}  // namespace fsdp::checkpoint
