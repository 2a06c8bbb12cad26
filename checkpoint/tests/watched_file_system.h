// A file system whose changes a test hears of before they are made.
#ifndef CHECKPOINT_TESTS_WATCHED_FILE_SYSTEM_H_
#define CHECKPOINT_TESTS_WATCHED_FILE_SYSTEM_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint::testing {

// Forwards to `base`, which outlives it, as it outlives its files. Thread-safe
// if the function is.
class WatchedFileSystem : public FileSystem {
 public:
  // Called in front of each change: of a file's contents with "write",
  // otherwise with any other word. May block; an error is that of the call.
  using BeforeChange = std::function<absl::Status(absl::string_view what,
                                                  const std::string& path)>;

  // Besides, in front of each write of a file's contents; or null.
  using BeforeWrite = std::function<void(const std::string& path,
                                         int64_t offset, int64_t bytes)>;

  WatchedFileSystem(FileSystem& base, BeforeChange before_change,
                    BeforeWrite before_write = nullptr)
      : base_(base),
        before_change_(std::move(before_change)),
        before_write_(std::move(before_write)) {}

  absl::StatusOr<std::unique_ptr<File>> OpenForReading(
      const std::string& path, Caching caching) override;
  absl::StatusOr<std::unique_ptr<File>> OpenForWriting(
      const std::string& path, Caching caching) override;
  absl::StatusOr<bool> MakeFolder(const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status RemoveFile(const std::string& path) override;
  absl::Status RemoveFolder(const std::string& path) override;
  absl::Status SyncFolder(const std::string& path) override;
  absl::StatusOr<std::vector<std::string>> List(
      const std::string& folder) override;
  absl::StatusOr<FileInfo> Stat(const std::string& path) override;
  absl::StatusOr<int64_t> FreeBytes(const std::string& folder) override;
  absl::StatusOr<std::unique_ptr<FileLock>> Lock(
      const std::string& path, absl::string_view holder) override;

 private:
  class OpenFile;

  FileSystem& base_;
  const BeforeChange before_change_;
  const BeforeWrite before_write_;
};

// Writes that wait until the test lets them. Thread-safe.
class WriteGate {
 public:
  // For a WatchedFileSystem.
  absl::Status Pass(absl::string_view what);

  void Hold();
  void Release();
  // Blocks until a write is held.
  void AwaitHeld();

 private:
  absl::Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  int held_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace fsdp::checkpoint::testing

#endif  // CHECKPOINT_TESTS_WATCHED_FILE_SYSTEM_H_
