#include "checkpoint/files/testing/forwarding_file_system.h"

#include <utility>

#include "absl/strings/str_cat.h"
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
    files_.BeforeFilling(out);
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

void ForwardingFileSystem::BeforeFilling(absl::Span<char>) {}

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

absl::Status FaultyFileSystem::BeforeReading(const std::string&) {
  absl::MutexLock lock(&mutex_);
  const bool ended = first_ >= 0 && error_ == 0 && calls_ > first_;
  return ended ? absl::AbortedError("the process has ended") : absl::OkStatus();
}

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
