// A disk in memory that can lose its power.
#ifndef BASE_FILES_TESTING_SIMULATED_FILE_SYSTEM_H_
#define BASE_FILES_TESTING_SIMULATED_FILE_SYSTEM_H_

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "base/files/file_system.h"

namespace fsdp::testing {

// Starts with the empty folder "/". It promises as little as POSIX does: what
// is not synced survives a loss of power in part, page by page and name by
// name. Has to outlive its files and locks. Thread-safe.
class SimulatedFileSystem : public FileSystem {
 public:
  struct Node;

  explicit SimulatedFileSystem(int64_t capacity_bytes = int64_t{1} << 40);
  ~SimulatedFileSystem() override;

  // Closes and unlocks everything: calls on these files are Aborted. Data stay.
  void KillProcess();
  // Does the same; and `seed` decides what of all that was not synced is lost:
  // each page of a file; its size; names in a folder, those that a rename joins
  // together.
  void LosePower(uint64_t seed);

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
  absl::StatusOr<FileLock> Lock(const std::string& path,
                                absl::string_view holder) override;

 private:
  class OpenFile;
  class HeldLock;

  std::shared_ptr<Node> Find(absl::string_view path) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::shared_ptr<Node>> FolderAt(absl::string_view what,
                                                 const std::string& path) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::shared_ptr<Node>> FileAt(const std::string& path,
                                               bool create)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Remove(absl::string_view what, const std::string& path,
                      bool folder) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t capacity_bytes_;
  mutable absl::Mutex mutex_;
  std::shared_ptr<Node> root_ ABSL_GUARDED_BY(mutex_);
  std::set<const Node*> locked_ ABSL_GUARDED_BY(mutex_);
  int64_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t process_ ABSL_GUARDED_BY(mutex_) = 0;  // counts kills
};

}  // namespace fsdp::testing

#endif  // BASE_FILES_TESTING_SIMULATED_FILE_SYSTEM_H_
