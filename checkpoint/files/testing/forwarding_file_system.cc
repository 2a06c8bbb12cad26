#include "checkpoint/files/testing/forwarding_file_system.h"

#include <utility>

#include "absl/types/span.h"
#include "base/status_macros.h"

namespace fsdp::checkpoint::testing {

class ForwardingFileSystem::OpenFile : public File {
 public:
  OpenFile(ForwardingFileSystem& files, std::unique_ptr<File> base,
           std::string path)
      : files_(files), base_(std::move(base)), path_(std::move(path)) {
    ++files_.opened_;
    const int64_t open = ++files_.open_;
    int64_t most = files_.most_open_;
    while (open > most &&
           !files_.most_open_.compare_exchange_weak(most, open)) {
    }
  }
  ~OpenFile() override { --files_.open_; }

  absl::Status PRead(int64_t offset, absl::Span<char> out) override {
    FSDP_RETURN_IF_ERROR(files_.BeforeReading(path_));
    files_.read_bytes_ += static_cast<int64_t>(out.size());
    return base_->PRead(offset, out);
  }
  absl::Status PWrite(int64_t offset, absl::Span<const char> bytes) override {
    FSDP_RETURN_IF_ERROR(files_.BeforeChange("write", path_));
    FSDP_RETURN_IF_ERROR(
        files_.BeforeWrite(path_, offset, static_cast<int64_t>(bytes.size())));
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
    FSDP_RETURN_IF_ERROR(files_.BeforeReading(path_));
    return base_->Size();
  }
  int64_t direct_bytes() const override { return base_->direct_bytes(); }

 private:
  ForwardingFileSystem& files_;
  const std::unique_ptr<File> base_;
  const std::string path_;
};

absl::Status ForwardingFileSystem::BeforeChange(absl::string_view,
                                                const std::string&) {
  return absl::OkStatus();
}

absl::Status ForwardingFileSystem::BeforeWrite(const std::string&, int64_t,
                                               int64_t) {
  return absl::OkStatus();
}

absl::Status ForwardingFileSystem::BeforeReading(const std::string&) {
  return absl::OkStatus();
}

std::unique_ptr<File> ForwardingFileSystem::Wrap(std::unique_ptr<File> file,
                                                 const std::string& path) {
  return std::make_unique<OpenFile>(*this, std::move(file), path);
}

absl::StatusOr<std::unique_ptr<File>> ForwardingFileSystem::OpenForReading(
    const std::string& path, Caching caching) {
  FSDP_RETURN_IF_ERROR(BeforeReading(path));
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                        base_.OpenForReading(path, caching));
  return Wrap(std::move(file), path);
}

absl::StatusOr<std::unique_ptr<File>> ForwardingFileSystem::OpenForWriting(
    const std::string& path, Caching caching) {
  FSDP_RETURN_IF_ERROR(BeforeChange("open", path));
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                        base_.OpenForWriting(path, caching));
  return Wrap(std::move(file), path);
}

absl::StatusOr<bool> ForwardingFileSystem::MakeFolder(const std::string& path) {
  FSDP_RETURN_IF_ERROR(BeforeChange("make folder", path));
  return base_.MakeFolder(path);
}

absl::Status ForwardingFileSystem::Rename(const std::string& from,
                                          const std::string& to) {
  FSDP_RETURN_IF_ERROR(BeforeChange("rename to", to));
  return base_.Rename(from, to);
}

absl::Status ForwardingFileSystem::RemoveFile(const std::string& path) {
  FSDP_RETURN_IF_ERROR(BeforeChange("remove", path));
  return base_.RemoveFile(path);
}

absl::Status ForwardingFileSystem::RemoveFolder(const std::string& path) {
  FSDP_RETURN_IF_ERROR(BeforeChange("remove folder", path));
  return base_.RemoveFolder(path);
}

absl::Status ForwardingFileSystem::SyncFolder(const std::string& path) {
  FSDP_RETURN_IF_ERROR(BeforeChange("sync folder", path));
  return base_.SyncFolder(path);
}

absl::StatusOr<std::vector<std::string>> ForwardingFileSystem::List(
    const std::string& folder) {
  FSDP_RETURN_IF_ERROR(BeforeReading(folder));
  return base_.List(folder);
}

absl::StatusOr<FileInfo> ForwardingFileSystem::Stat(const std::string& path) {
  FSDP_RETURN_IF_ERROR(BeforeReading(path));
  return base_.Stat(path);
}

absl::StatusOr<int64_t> ForwardingFileSystem::FreeBytes(
    const std::string& folder) {
  FSDP_RETURN_IF_ERROR(BeforeReading(folder));
  return base_.FreeBytes(folder);
}

absl::StatusOr<std::unique_ptr<FileLock>> ForwardingFileSystem::Lock(
    const std::string& path, absl::string_view holder) {
  FSDP_RETURN_IF_ERROR(BeforeChange("lock", path));
  return base_.Lock(path, holder);
}

}  // namespace fsdp::checkpoint::testing
