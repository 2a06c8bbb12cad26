// File systems that hand their calls on to another one: for tests that watch
// the calls or come between, one that fails or stops at a call, and one that
// refuses what a mounted object store refuses.
#ifndef CHECKPOINT_FILES_TESTING_FORWARDING_FILE_SYSTEM_H_
#define CHECKPOINT_FILES_TESTING_FORWARDING_FILE_SYSTEM_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint::testing {

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

 protected:
  // Is called before each call that changes something, with "write" if that is
  // a file's contents, else with other words. May block; if it returns an
  // error, the call is not made and returns that.
  virtual absl::Status BeforeChange(absl::string_view what,
                                    const std::string& path);
  // Is called after BeforeChange() of "write", and in the same way.
  virtual absl::Status BeforeWrite(const std::string& path, int64_t offset,
                                   int64_t bytes);
  // Is called before all other calls, in the same way.
  virtual absl::Status BeforeReading(const std::string& path);
  // Is called before a file is read into `out`, by any thread.
  virtual void BeforeFilling(absl::Span<char> out);

 private:
  class OpenFile;

  std::unique_ptr<File> Wrap(std::unique_ptr<File> file,
                             const std::string& path);

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
  void FailCall(int64_t call, int error, bool for_good);
  // Calls from number `call` on, and calls that read after it, do nothing and
  // are Aborted: the process has ended before it.
  void StopAtCall(int64_t call);

  // Counts calls that changed something, or would have.
  int64_t calls() const;

 private:
  // Counts the call; returns whether it may be made.
  absl::Status BeforeChange(absl::string_view what,
                            const std::string& path) override;
  absl::Status BeforeReading(const std::string& path) override;

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
      const std::string& path, Caching caching) override;
  absl::Status RemoveFile(const std::string& path) override;

 private:
  absl::Status BeforeChange(absl::string_view what,
                            const std::string& path) override;
  absl::Status BeforeWrite(const std::string& path, int64_t offset,
                           int64_t bytes) override;

  FileSystem& base_;
  absl::Mutex mutex_;
  // The offset of the next write, for files that are not synced yet.
  std::map<std::string, int64_t> unsynced_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace fsdp::checkpoint::testing

#endif  // CHECKPOINT_FILES_TESTING_FORWARDING_FILE_SYSTEM_H_
