#include "base/files/file_system.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace fsdp {
namespace {

constexpr int kMaxDepth = 8;

absl::Status RemoveTree(FileSystem& files, const std::string& path, int depth) {
  if (depth > kMaxDepth) {
    return absl::InvalidArgumentError(
        absl::StrCat("remove ", path, ": more than ", kMaxDepth,
                     " folders in each other; remove them by hand"));
  }
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, files.List(path));
  for (const std::string& name : names) {
    const std::string inside = JoinPath(path, name);
    FSDP_ASSIGN_OR_RETURN(const FileInfo info, files.Stat(inside));
    FSDP_RETURN_IF_ERROR(info.kind == FileInfo::Kind::kFolder
                             ? RemoveTree(files, inside, depth + 1)
                             : files.RemoveFile(inside));
  }
  const absl::Status removed = files.RemoveFolder(path);
  return absl::IsNotFound(removed) ? absl::OkStatus() : removed;
}

absl::string_view WithoutSlashes(absl::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  return path;
}

absl::Status WriteWhole(File& file, absl::string_view contents) {
  FSDP_RETURN_IF_ERROR(
      file.PWrite(0, absl::MakeConstSpan(contents.data(), contents.size())));
  return file.Sync();
}

}  // namespace

std::string ThisProcess() {
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  return absl::StrCat("process ", getpid(), " on ", host);
}

std::string JoinPath(absl::string_view folder, absl::string_view name) {
  return absl::StrCat(folder, "/", name);
}

std::string FolderOf(absl::string_view path) {
  path = WithoutSlashes(path);
  const size_t slash = path.rfind('/');
  if (slash == absl::string_view::npos) return ".";
  return std::string(path.substr(0, std::max<size_t>(slash, 1)));
}

absl::StatusOr<bool> Exists(FileSystem& files, const std::string& path) {
  const absl::StatusOr<FileInfo> info = files.Stat(path);
  if (absl::IsNotFound(info.status())) return false;
  FSDP_RETURN_IF_ERROR(info.status());
  return true;
}

absl::StatusOr<bool> IsFolder(FileSystem& files, const std::string& path) {
  FSDP_ASSIGN_OR_RETURN(const FileInfo info, files.Stat(path));
  if (info.kind != FileInfo::Kind::kOther) {
    return info.kind == FileInfo::Kind::kFolder;
  }
  return files.List(path).ok();
}

absl::Status RemoveTree(FileSystem& files, const std::string& path) {
  FSDP_ASSIGN_OR_RETURN(const bool exists, Exists(files, path));
  return exists ? RemoveTree(files, path, 1) : absl::OkStatus();
}

absl::StatusOr<std::string> ReadFile(FileSystem& files, const std::string& path,
                                     int64_t max_bytes) {
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                        files.OpenForReading(path, Caching::kCached));
  FSDP_ASSIGN_OR_RETURN(const int64_t bytes, file->Size());
  if (bytes > max_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("read ", path, ": it has ", bytes, " bytes; more than ",
                     max_bytes, " are not believed"));
  }
  std::string contents(bytes, '\0');
  FSDP_RETURN_IF_ERROR(file->PRead(0, absl::MakeSpan(&contents[0], bytes)));
  return contents;
}

absl::Status WriteFile(FileSystem& files, const std::string& path,
                       absl::string_view contents) {
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                        files.OpenForWriting(path, Caching::kCached));
  FSDP_RETURN_IF_ERROR(file->SetSize(0));
  return WriteWhole(*file, contents);
}

absl::Status WriteNewFile(FileSystem& files, const std::string& path,
                          absl::string_view contents) {
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<File> file,
                        files.OpenForWriting(path, Caching::kCached));
  return WriteWhole(*file, contents);
}

absl::Status ReplaceFile(FileSystem& files, const std::string& path,
                         absl::string_view contents) {
  const std::string temporary = absl::StrCat(path, ".tmp");
  FSDP_RETURN_IF_ERROR(WriteFile(files, temporary, contents));
  FSDP_RETURN_IF_ERROR(files.Rename(temporary, path));
  return files.SyncFolder(FolderOf(path));
}

NewFolder::NewFolder(FileSystem& files, absl::string_view path)
    : files_(files),
      path_(WithoutSlashes(path)),
      incomplete_(absl::StrCat(path_, ".incomplete")),
      lock_path_(absl::StrCat(incomplete_, ".lock")) {}

NewFolder::~NewFolder() { Discard(); }

absl::Status NewFolder::Claim(absl::string_view what) {
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
  absl::Status begun = Begin();
  if (!begun.ok()) Discard();
  return begun;
}

absl::Status NewFolder::Begin() {
  // The process that had the lock may have committed.
  FSDP_RETURN_IF_ERROR(CheckIsFree());
  FSDP_RETURN_IF_ERROR(RemoveIncomplete());
  return files_.MakeFolder(incomplete_).status();
}

absl::Status NewFolder::Commit() {
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

absl::Status NewFolder::Rename() {
  FSDP_RETURN_IF_ERROR(files_.SyncFolder(incomplete_));
  FSDP_RETURN_IF_ERROR(CheckIsFree());
  FSDP_RETURN_IF_ERROR(files_.Rename(incomplete_, path_));
  const absl::Status synced = files_.SyncFolder(FolderOf(path_));
  return synced.ok() ? synced : UndoRename(synced);
}

absl::Status NewFolder::UndoRename(const absl::Status& why) {
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

void NewFolder::Discard() {
  if (lock_ == nullptr) return;
  // The error that the caller returns says more than one of this.
  RemoveIncomplete().IgnoreError();
  Release();
}

absl::Status NewFolder::CheckIsFree() {
  if (path_.empty()) {
    return absl::InvalidArgumentError(
        "\"\" is no path to write to: name a folder");
  }
  const absl::StatusOr<FileInfo> info = files_.Stat(path_);
  if (absl::IsNotFound(info.status())) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(info.status());
  return absl::AlreadyExistsError(absl::StrCat(
      path_,
      " is there already and is not written over: name another one, or "
      "move that one away"));
}

absl::Status NewFolder::RemoveIncomplete() {
  const absl::StatusOr<FileInfo> info = files_.Stat(incomplete_);
  if (absl::IsNotFound(info.status())) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(info.status());
  return info->kind == FileInfo::Kind::kFolder ? RemoveTree(files_, incomplete_)
                                               : files_.RemoveFile(incomplete_);
}

// Removes the file before it unlocks it: whoever has opened it finds it gone.
void NewFolder::Release() {
  files_.RemoveFile(lock_path_).IgnoreError();
  lock_.reset();
}

bool IsPlainFileName(absl::string_view name) {
  constexpr absl::string_view kForbidden("/\\\0", 3);
  return !name.empty() && name != "." && name != ".." &&
         name.size() <= kMaxNameBytes &&
         name.find_first_of(kForbidden) == absl::string_view::npos;
}

absl::string_view FolderPart(absl::string_view path) {
  const size_t slash = path.rfind('/');
  return slash == absl::string_view::npos ? "" : path.substr(0, slash + 1);
}

absl::string_view LastPart(absl::string_view path) {
  return path.substr(FolderPart(path).size());
}

namespace {

// The code of an error, and what to do.
std::pair<absl::StatusCode, absl::string_view> AdviceOn(int error) {
  using Code = absl::StatusCode;
  switch (error) {
    case ENOENT:
      return {Code::kNotFound, "check the path"};
    case EACCES:
    case EPERM:
      return {Code::kPermissionDenied,
              "give this user the right to it or choose another folder"};
    case EROFS:
      return {Code::kPermissionDenied,
              "mount it for writing or choose another folder"};
    case ENOSPC:
    case EDQUOT:
      return {Code::kResourceExhausted,
              "free space there or choose another folder"};
    case EFBIG:
      return {Code::kResourceExhausted,
              "raise the limit on the size of files (ulimit -f)"};
    case EMFILE:
    case ENFILE:
      return {Code::kResourceExhausted,
              "raise the limit on open files (ulimit -n)"};
    case EEXIST:
      return {Code::kAlreadyExists, "choose another name"};
    case ENOTEMPTY:
      return {Code::kFailedPrecondition, "somebody else writes there; see who"};
    case ENOTDIR:
    case EISDIR:
    case ELOOP:
    case ENXIO:
      return {Code::kFailedPrecondition, "see what is there; name another"};
    case EINVAL:
    case ENAMETOOLONG:
      return {Code::kInvalidArgument, "choose another name"};
    default:
      return {Code::kUnavailable,
              "the system's log says more about the device"};
  }
}

}  // namespace

absl::Status FileError(int error, absl::string_view what,
                       absl::string_view path) {
  const auto [code, advice] = AdviceOn(error);
  // The system and OpenRegularFile() report FIFOs, sockets and devices so.
  const absl::string_view why =
      error == ENXIO ? "it is no regular file" : std::strerror(error);
  return absl::Status(code,
                      absl::StrCat(what, " ", path, ": ", why, "; ", advice));
}

absl::Status EndsEarly(absl::string_view path, int64_t offset, int64_t wanted,
                       int64_t found) {
  return absl::DataLossError(absl::StrCat(
      "read ", path, ": it ends after ", found, " of the ", wanted,
      " bytes from byte ", offset, " on; somebody has cut it off"));
}

}  // namespace fsdp
