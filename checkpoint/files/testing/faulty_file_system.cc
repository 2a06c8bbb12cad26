#include "checkpoint/files/testing/faulty_file_system.h"

#include <utility>

#include "absl/memory/memory.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/files/file_error.h"

namespace fsdp::checkpoint::testing {

class FaultyFileSystem::OpenFile : public File {
 public:
  OpenFile(FaultyFileSystem& files, std::unique_ptr<File> base,
           std::string path)
      : files_(files), base_(std::move(base)), path_(std::move(path)) {}

  absl::Status PRead(int64_t offset, absl::Span<char> out) override {
    FSDP_RETURN_IF_ERROR(files_.BeforeReading());
    files_.read_bytes_ += static_cast<int64_t>(out.size());
    return base_->PRead(offset, out);
  }
  absl::Status PWrite(int64_t offset, absl::Span<const char> bytes) override {
    FSDP_RETURN_IF_ERROR(files_.BeforeChange("write", path_));
    return base_->PWrite(offset, bytes);
  }
  absl::Status SetSize(int64_t bytes) override {
    FSDP_RETURN_IF_ERROR(files_.BeforeChange("set the size of", path_));
    return base_->SetSize(bytes);
  }
  absl::Status Sync() override {
    FSDP_RETURN_IF_ERROR(files_.BeforeChange("sync", path_));
    return base_->Sync();
  }
  absl::StatusOr<int64_t> Size() override {
    FSDP_RETURN_IF_ERROR(files_.BeforeReading());
    return base_->Size();
  }
  int64_t direct_bytes() const override { return base_->direct_bytes(); }

 private:
  FaultyFileSystem& files_;
  const std::unique_ptr<File> base_;
  const std::string path_;
};

void FaultyFileSystem::FailCall(int64_t call, int error, bool for_good) {
  absl::MutexLock lock(&mutex_);
  first_ = call;
  error_ = error;
  for_good_ = for_good;
}

void FaultyFileSystem::StopAtCall(int64_t call) {
  FailCall(call, /*error=*/0, /*for_good=*/true);
}

int64_t FaultyFileSystem::calls() const {
  absl::MutexLock lock(&mutex_);
  return calls_;
}

absl::Status FaultyFileSystem::BeforeChange(absl::string_view what,
                                            const std::string& path) {
  absl::MutexLock lock(&mutex_);
  const int64_t call = calls_++;
  const bool hit = first_ >= 0 && (for_good_ ? call >= first_ : call == first_);
  if (!hit) return absl::OkStatus();
  return error_ != 0 ? FileError(error_, what, path)
                     : absl::AbortedError("the process has ended");
}

absl::Status FaultyFileSystem::BeforeReading() const {
  absl::MutexLock lock(&mutex_);
  const bool ended = first_ >= 0 && error_ == 0 && calls_ > first_;
  return ended ? absl::AbortedError("the process has ended") : absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<File>> FaultyFileSystem::OpenForReading(
    const std::string& path, Caching caching) {
  FSDP_RETURN_IF_ERROR(BeforeReading());
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                        base_.OpenForReading(path, caching));
  return absl::make_unique<OpenFile>(*this, std::move(file), path);
}

absl::StatusOr<std::unique_ptr<File>> FaultyFileSystem::OpenForWriting(
    const std::string& path, Caching caching) {
  FSDP_RETURN_IF_ERROR(BeforeChange("open", path));
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                        base_.OpenForWriting(path, caching));
  return absl::make_unique<OpenFile>(*this, std::move(file), path);
}

absl::StatusOr<bool> FaultyFileSystem::MakeFolder(const std::string& path) {
  FSDP_RETURN_IF_ERROR(BeforeChange("make folder", path));
  return base_.MakeFolder(path);
}

absl::Status FaultyFileSystem::Rename(const std::string& from,
                                      const std::string& to) {
  FSDP_RETURN_IF_ERROR(BeforeChange("rename to", to));
  return base_.Rename(from, to);
}

absl::Status FaultyFileSystem::RemoveFile(const std::string& path) {
  FSDP_RETURN_IF_ERROR(BeforeChange("remove", path));
  return base_.RemoveFile(path);
}

absl::Status FaultyFileSystem::RemoveFolder(const std::string& path) {
  FSDP_RETURN_IF_ERROR(BeforeChange("remove folder", path));
  return base_.RemoveFolder(path);
}

absl::Status FaultyFileSystem::SyncFolder(const std::string& path) {
  FSDP_RETURN_IF_ERROR(BeforeChange("sync folder", path));
  return base_.SyncFolder(path);
}

absl::StatusOr<std::vector<std::string>> FaultyFileSystem::List(
    const std::string& folder) {
  FSDP_RETURN_IF_ERROR(BeforeReading());
  return base_.List(folder);
}

absl::StatusOr<FileInfo> FaultyFileSystem::Stat(const std::string& path) {
  FSDP_RETURN_IF_ERROR(BeforeReading());
  return base_.Stat(path);
}

absl::StatusOr<int64_t> FaultyFileSystem::FreeBytes(const std::string& folder) {
  FSDP_RETURN_IF_ERROR(BeforeReading());
  return base_.FreeBytes(folder);
}

absl::StatusOr<std::unique_ptr<FileLock>> FaultyFileSystem::Lock(
    const std::string& path, absl::string_view holder) {
  FSDP_RETURN_IF_ERROR(BeforeChange("lock", path));
  return base_.Lock(path, holder);
}

}  // namespace fsdp::checkpoint::testing
