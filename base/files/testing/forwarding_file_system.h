// File systems that hand their calls on to another one: for tests that watch
// the calls or come between, one that fails or stops at a call, and one that
// refuses what a mounted object store refuses.
#ifndef BASE_FILES_TESTING_FORWARDING_FILE_SYSTEM_H_
#define BASE_FILES_TESTING_FORWARDING_FILE_SYSTEM_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "base/files/file_system.h"
#include "base/status_macros.h"

namespace fsdp::testing {

// `base` outlives it, and it outlives its files. Thread-safe if the hooks are.
class ForwardingFileSystem : public FileSystem {
 public:
  explicit ForwardingFileSystem(FileSystem& base) : base_(base) {}

  // Counts bytes of PRead().
  int64_t read_bytes() const { return read_bytes_; }
  // Count opened files, and the most of them that were open at a time.
  int64_t opened() const { return opened_; }
  int64_t most_open() const { return most_open_; }

  absl::StatusOr<std::unique_ptr<File>> OpenForReading(
      const std::string& path, Caching caching) override {
    FSDP_RETURN_IF_ERROR(BeforeReading(path));
    FSDP_ASSIGN_OR_RETURN(auto file, base_.OpenForReading(path, caching));
    return Wrap(std::move(file), path);
  }

  absl::StatusOr<std::unique_ptr<File>> OpenForWriting(
      const std::string& path, Caching caching) override {
    FSDP_RETURN_IF_ERROR(BeforeChange("open", path));
    FSDP_ASSIGN_OR_RETURN(auto file, base_.OpenForWriting(path, caching));
    return Wrap(std::move(file), path);
  }

  absl::StatusOr<bool> MakeFolder(const std::string& path) override {
    FSDP_RETURN_IF_ERROR(BeforeChange("make folder", path));
    return base_.MakeFolder(path);
  }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    FSDP_RETURN_IF_ERROR(BeforeChange("rename to", to));
    return base_.Rename(from, to);
  }

  absl::Status RemoveFile(const std::string& path) override {
    FSDP_RETURN_IF_ERROR(BeforeChange("remove", path));
    return base_.RemoveFile(path);
  }

  absl::Status RemoveFolder(const std::string& path) override {
    FSDP_RETURN_IF_ERROR(BeforeChange("remove folder", path));
    return base_.RemoveFolder(path);
  }

  absl::Status SyncFolder(const std::string& path) override {
    FSDP_RETURN_IF_ERROR(BeforeChange("sync folder", path));
    return base_.SyncFolder(path);
  }

  absl::StatusOr<std::vector<std::string>> List(
      const std::string& folder) override {
    FSDP_RETURN_IF_ERROR(BeforeReading(folder));
    return base_.List(folder);
  }

  absl::StatusOr<FileInfo> Stat(const std::string& path) override {
    FSDP_RETURN_IF_ERROR(BeforeReading(path));
    return base_.Stat(path);
  }

  absl::StatusOr<int64_t> FreeBytes(const std::string& folder) override {
    FSDP_RETURN_IF_ERROR(BeforeReading(folder));
    return base_.FreeBytes(folder);
  }

  absl::StatusOr<FileLock> Lock(const std::string& path,
                                absl::string_view holder) override {
    FSDP_RETURN_IF_ERROR(BeforeChange("lock", path));
    return base_.Lock(path, holder);
  }

 protected:
  // Is called before each call that changes something, with "write" if that is
  // a file's contents, else with other words. May block; if it returns an
  // error, the call is not made and returns that.
  virtual absl::Status BeforeChange(absl::string_view /*what*/,
                                    const std::string& /*path*/) {
    return absl::OkStatus();
  }

  // Is called after BeforeChange() of "write", and in the same way.
  virtual absl::Status BeforeWrite(const std::string& /*path*/,
                                   int64_t /*offset*/, int64_t /*bytes*/) {
    return absl::OkStatus();
  }

  // Is called before all other calls, in the same way.
  virtual absl::Status BeforeReading(const std::string& /*path*/) {
    return absl::OkStatus();
  }

  // Is called before a file is read into `out`, by any thread.
  virtual void BeforeFilling(absl::Span<char> /*out*/) {}

 private:
  class OpenFile : public File {
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
      FSDP_RETURN_IF_ERROR(files_.BeforeWrite(
          path_, offset, static_cast<int64_t>(bytes.size())));
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

   private:
    ForwardingFileSystem& files_;
    const std::unique_ptr<File> base_;
    const std::string path_;
  };

  std::unique_ptr<File> Wrap(std::unique_ptr<File> file,
                             const std::string& path) {
    return std::make_unique<OpenFile>(*this, std::move(file), path);
  }

  FileSystem& base_;
  std::atomic<int64_t> read_bytes_{0};
  std::atomic<int64_t> opened_{0};
  std::atomic<int64_t> open_{0};
  std::atomic<int64_t> most_open_{0};
};

// Thread-safe.
class FaultyFileSystem : public ForwardingFileSystem {
 public:
  explicit FaultyFileSystem(FileSystem& base) : ForwardingFileSystem(base) {}

  // Call number `call`, from 0, and all after it if `for_good`, do nothing and
  // fail with `error`, an errno.
  void FailCall(int64_t call, int error, bool for_good) {
    absl::MutexLock lock(&mutex_);
    first_ = call;
    error_ = error;
    for_good_ = for_good;
  }

  // Calls from number `call` on, and calls that read after it, do nothing and
  // are Aborted: the process has ended before it.
  void StopAtCall(int64_t call) {
    FailCall(call, /*error=*/0, /*for_good=*/true);
  }

  // Counts calls that changed something, or would have.
  int64_t calls() const {
    absl::MutexLock lock(&mutex_);
    return calls_;
  }

 private:
  // Counts the call; returns whether it may be made.
  absl::Status BeforeChange(absl::string_view what,
                            const std::string& path) override {
    absl::MutexLock lock(&mutex_);
    const int64_t call = calls_++;
    const bool hit =
        first_ >= 0 && (for_good_ ? call >= first_ : call == first_);
    if (!hit) return absl::OkStatus();
    return error_ != 0 ? FileError(error_, what, path)
                       : absl::AbortedError("the process has ended");
  }

  absl::Status BeforeReading(const std::string&) override {
    absl::MutexLock lock(&mutex_);
    const bool ended = first_ >= 0 && error_ == 0 && calls_ > first_;
    return ended ? absl::AbortedError("the process has ended")
                 : absl::OkStatus();
  }

  mutable absl::Mutex mutex_;
  int64_t calls_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t first_ ABSL_GUARDED_BY(mutex_) = -1;  // -1: none
  int error_ ABSL_GUARDED_BY(mutex_) = 0;       // 0: it stops
  bool for_good_ ABSL_GUARDED_BY(mutex_) = false;
};

// Returns Unimplemented for a rename and for a lock; for opening a file that is
// there for writing; for a write that is not the next one of its file, or comes
// after Sync(); and for setting a size. A folder vanishes with the last thing
// in it. Thread-safe.
class ObjectStoreMount : public ForwardingFileSystem {
 public:
  explicit ObjectStoreMount(FileSystem& base)
      : ForwardingFileSystem(base), base_(base) {}

  absl::StatusOr<std::unique_ptr<File>> OpenForWriting(
      const std::string& path, Caching caching) override {
    FSDP_ASSIGN_OR_RETURN(const bool exists, Exists(base_, path));
    if (exists) return Refused("write once more", path);
    FSDP_ASSIGN_OR_RETURN(std::unique_ptr<File> file,
                          ForwardingFileSystem::OpenForWriting(path, caching));
    absl::MutexLock lock(&mutex_);
    unsynced_[path] = 0;
    return file;
  }

  absl::Status RemoveFile(const std::string& path) override {
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

 private:
  absl::Status BeforeChange(absl::string_view what,
                            const std::string& path) override {
    if (what == "rename to" || what == "lock" || what == "set the size of") {
      return Refused(what, path);
    }
    absl::MutexLock lock(&mutex_);
    if (what == "sync") unsynced_.erase(path);
    return absl::OkStatus();
  }

  absl::Status BeforeWrite(const std::string& path, int64_t offset,
                           int64_t bytes) override {
    absl::MutexLock lock(&mutex_);
    const auto next = unsynced_.find(path);
    if (next == unsynced_.end() || next->second != offset) {
      return Refused(absl::StrCat("write at ", offset, " of"), path);
    }
    next->second += bytes;
    return absl::OkStatus();
  }

  static absl::Status Refused(absl::string_view what, absl::string_view path) {
    return absl::UnimplementedError(
        absl::StrCat(what, " ", path, ": this storage cannot do that"));
  }

  FileSystem& base_;
  absl::Mutex mutex_;
  // The offset of the next write, for files that are not synced yet.
  std::map<std::string, int64_t> unsynced_ ABSL_GUARDED_BY(mutex_);
};

// Calls `before` with the path before each call that changes nothing.
class ReadHookFileSystem final : public ForwardingFileSystem {
 public:
  using Before = std::function<absl::Status(const std::string& path)>;

  ReadHookFileSystem(FileSystem& base, Before before)
      : ForwardingFileSystem(base), before_(std::move(before)) {}

 private:
  absl::Status BeforeReading(const std::string& path) override {
    return before_(path);
  }

  const Before before_;
};

}  // namespace fsdp::testing

#endif  // BASE_FILES_TESTING_FORWARDING_FILE_SYSTEM_H_
