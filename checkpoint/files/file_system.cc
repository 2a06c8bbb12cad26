#include "checkpoint/files/file_system.h"

#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace fsdp::checkpoint {
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
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
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

}  // namespace fsdp::checkpoint
