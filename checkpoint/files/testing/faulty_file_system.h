// A file system that fails, or is as if its process were killed, at a call.
#ifndef CHECKPOINT_FILES_TESTING_FAULTY_FILE_SYSTEM_H_
#define CHECKPOINT_FILES_TESTING_FAULTY_FILE_SYSTEM_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint::testing {

// Forwards to `base`, which has to outlive it, as it has to outlive its files.
// Counts the calls that change something. Thread-safe.
class FaultyFileSystem : public FileSystem {
 public:
  explicit FaultyFileSystem(FileSystem& base) : base_(base) {}

  // Call number `call` from 0, and all after it if `for_good`, do nothing and
  // fail with `error`, an errno.
  void FailCall(int64_t call, int error, bool for_good);
  // Calls from number `call` on do nothing, and are Aborted, as are those that
  // read: the process has ended in front of it.
  void StopAtCall(int64_t call);

  // That changed something, or would have.
  int64_t calls() const;
  // By PRead().
  int64_t read_bytes() const { return read_bytes_; }

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

  // Counts; whether the call may be made.
  absl::Status BeforeChange(absl::string_view what, const std::string& path);
  absl::Status BeforeReading() const;

  FileSystem& base_;
  std::atomic<int64_t> read_bytes_{0};
  mutable absl::Mutex mutex_;
  int64_t calls_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t first_ ABSL_GUARDED_BY(mutex_) = -1;  // -1: none
  int error_ ABSL_GUARDED_BY(mutex_) = 0;       // 0: it stops
  bool for_good_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace fsdp::checkpoint::testing

#endif  // CHECKPOINT_FILES_TESTING_FAULTY_FILE_SYSTEM_H_
