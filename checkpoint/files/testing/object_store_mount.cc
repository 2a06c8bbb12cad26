#include "checkpoint/files/testing/object_store_mount.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace fsdp::checkpoint::testing {
namespace {

absl::Status Refused(absl::string_view what, absl::string_view path) {
  return absl::UnimplementedError(
      absl::StrCat(what, " ", path, ": this storage cannot do that"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<File>> ObjectStoreMount::OpenForWriting(
    const std::string& path, Caching caching) {
  FSDP_ASSIGN_OR_RETURN(const bool exists, Exists(base_, path));
  if (exists) return Refused("write once more", path);
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                        ForwardingFileSystem::OpenForWriting(path, caching));
  absl::MutexLock lock(&mutex_);
  unsynced_[path] = 0;
  return file;
}

absl::Status ObjectStoreMount::RemoveFile(const std::string& path) {
  FSDP_RETURN_IF_ERROR(ForwardingFileSystem::RemoveFile(path));
  {
    absl::MutexLock lock(&mutex_);
    unsynced_.erase(path);
  }
  const std::string folder = FolderOf(path);
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                        base_.List(folder));
  return names.empty() ? base_.RemoveFolder(folder) : absl::OkStatus();
}

absl::Status ObjectStoreMount::BeforeChange(absl::string_view what,
                                            const std::string& path) {
  if (what == "rename to" || what == "lock" || what == "set the size of") {
    return Refused(what, path);
  }
  absl::MutexLock lock(&mutex_);
  if (what == "sync") unsynced_.erase(path);
  return absl::OkStatus();
}

absl::Status ObjectStoreMount::BeforeWrite(const std::string& path,
                                           int64_t offset, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  const auto next = unsynced_.find(path);
  if (next == unsynced_.end() || next->second != offset) {
    return Refused(absl::StrCat("write at ", offset, " of"), path);
  }
  next->second += bytes;
  return absl::OkStatus();
}

}  // namespace fsdp::checkpoint::testing
