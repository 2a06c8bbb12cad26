#include "checkpoint/tests/watched_file_system.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint::testing {

class WatchedFileSystem::OpenFile : public File {
 public:
  OpenFile(const WatchedFileSystem& files, std::unique_ptr<File> base,
           std::string path)
      : files_(files), base_(std::move(base)), path_(std::move(path)) {}

  absl::Status PRead(int64_t offset, absl::Span<char> out) override {
    return base_->PRead(offset, out);
  }
  absl::Status PWrite(int64_t offset, absl::Span<const char> bytes) override {
    FSDP_RETURN_IF_ERROR(files_.before_change_("write", path_));
    if (files_.before_write_ != nullptr) {
      files_.before_write_(path_, offset, static_cast<int64_t>(bytes.size()));
    }
    return base_->PWrite(offset, bytes);
  }
  absl::Status SetSize(int64_t bytes) override {
    FSDP_RETURN_IF_ERROR(files_.before_change_("set size", path_));
    return base_->SetSize(bytes);
  }
  absl::Status Sync() override {
    FSDP_RETURN_IF_ERROR(files_.before_change_("sync", path_));
    return base_->Sync();
  }
  absl::StatusOr<int64_t> Size() override { return base_->Size(); }
  int64_t direct_bytes() const override { return base_->direct_bytes(); }

 private:
  const WatchedFileSystem& files_;
  const std::unique_ptr<File> base_;
  const std::string path_;
};

absl::StatusOr<std::unique_ptr<File>> WatchedFileSystem::OpenForReading(
    const std::string& path, Caching caching) {
  return base_.OpenForReading(path, caching);
}

absl::StatusOr<std::unique_ptr<File>> WatchedFileSystem::OpenForWriting(
    const std::string& path, Caching caching) {
  FSDP_RETURN_IF_ERROR(before_change_("open", path));
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                        base_.OpenForWriting(path, caching));
  return std::make_unique<OpenFile>(*this, std::move(file), path);
}

absl::StatusOr<bool> WatchedFileSystem::MakeFolder(const std::string& path) {
  FSDP_RETURN_IF_ERROR(before_change_("make folder", path));
  return base_.MakeFolder(path);
}

absl::Status WatchedFileSystem::Rename(const std::string& from,
                                       const std::string& to) {
  FSDP_RETURN_IF_ERROR(before_change_("rename", to));
  return base_.Rename(from, to);
}

absl::Status WatchedFileSystem::RemoveFile(const std::string& path) {
  FSDP_RETURN_IF_ERROR(before_change_("remove", path));
  return base_.RemoveFile(path);
}

absl::Status WatchedFileSystem::RemoveFolder(const std::string& path) {
  FSDP_RETURN_IF_ERROR(before_change_("remove folder", path));
  return base_.RemoveFolder(path);
}

absl::Status WatchedFileSystem::SyncFolder(const std::string& path) {
  FSDP_RETURN_IF_ERROR(before_change_("sync folder", path));
  return base_.SyncFolder(path);
}

absl::StatusOr<std::vector<std::string>> WatchedFileSystem::List(
    const std::string& folder) {
  return base_.List(folder);
}

absl::StatusOr<FileInfo> WatchedFileSystem::Stat(const std::string& path) {
  return base_.Stat(path);
}

absl::StatusOr<int64_t> WatchedFileSystem::FreeBytes(
    const std::string& folder) {
  return base_.FreeBytes(folder);
}

absl::StatusOr<std::unique_ptr<FileLock>> WatchedFileSystem::Lock(
    const std::string& path, absl::string_view holder) {
  FSDP_RETURN_IF_ERROR(before_change_("lock", path));
  return base_.Lock(path, holder);
}

absl::Status WriteGate::Pass(absl::string_view what) {
  if (what != "write") return absl::OkStatus();
  const auto is_open = [this]() { return !closed_; };
  absl::MutexLock lock(&mutex_);
  ++held_;
  mutex_.Await(absl::Condition(&is_open));
  --held_;
  return absl::OkStatus();
}

void WriteGate::Hold() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
}

void WriteGate::Release() {
  absl::MutexLock lock(&mutex_);
  closed_ = false;
}

void WriteGate::AwaitHeld() {
  const auto holds = [this]() { return held_ > 0; };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&holds));
}

}  // namespace fsdp::checkpoint::testing
