#include "tools/checkpoint/new_output.h"

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "tools/checkpoint/text.h"

namespace fsdp::checkpoint::tool {

absl::StatusOr<NewOutput> NewOutput::Create(FileSystem& files,
                                            const std::string& path, Kind kind,
                                            int64_t bytes) {
  std::string name = path;
  while (name.size() > 1 && name.back() == '/') name.pop_back();
  FSDP_ASSIGN_OR_RETURN(const bool exists, Exists(files, name));
  if (exists) {
    return absl::AlreadyExistsError(absl::StrCat(
        name,
        " is there already and is not written over: name another output, "
        "or remove it"));
  }
  NewOutput output(files, name, kind);
  const std::string incomplete = output.incomplete_;
  absl::StatusOr<bool> left = Exists(files, incomplete);
  if (left.ok() && *left) {
    left = absl::AlreadyExistsError(absl::StrCat(
        incomplete,
        " is there already: another program writes it, or one that "
        "was stopped has left it; then remove it"));
  }
  absl::StatusOr<int64_t> space = files.FreeBytes(FolderOf(name));
  absl::Status status = left.status();
  status.Update(space.status());
  if (status.ok() && *space < bytes) {
    status = absl::ResourceExhaustedError(absl::StrCat(
        name, " will have ", SizeText(bytes), ", and the disk has ",
        SizeText(*space), ": free space there or choose another folder"));
  }
  if (status.ok() && kind == Kind::kFolder) {
    status = files.MakeFolder(incomplete).status();
  }
  if (status.ok()) return output;
  output.files_ = nullptr;
  return status;
}

NewOutput::NewOutput(FileSystem& files, std::string path, Kind kind)
    : files_(&files),
      path_(std::move(path)),
      incomplete_(absl::StrCat(path_, ".incomplete")),
      kind_(kind) {}

NewOutput::NewOutput(NewOutput&& other) noexcept
    : files_(std::exchange(other.files_, nullptr)),
      path_(std::move(other.path_)),
      incomplete_(std::move(other.incomplete_)),
      kind_(other.kind_) {}

NewOutput::~NewOutput() {
  if (files_ == nullptr) return;
  // An error that the caller has says more than one of this.
  (kind_ == Kind::kFolder ? RemoveTree(*files_, incomplete_)
                          : files_->RemoveFile(incomplete_))
      .IgnoreError();
}

absl::Status NewOutput::Commit() {
  if (kind_ == Kind::kFolder) {
    FSDP_RETURN_IF_ERROR(files_->SyncFolder(incomplete_));
  }
  FSDP_RETURN_IF_ERROR(files_->Rename(incomplete_, path_));
  FileSystem* const files = std::exchange(files_, nullptr);
  return files->SyncFolder(FolderOf(path_));
}

}  // namespace fsdp::checkpoint::tool
