// A file system that hands its calls on to another one, for tests that watch
// the calls or come between.
#ifndef CHECKPOINT_FILES_TESTING_FORWARDING_FILE_SYSTEM_H_
#define CHECKPOINT_FILES_TESTING_FORWARDING_FILE_SYSTEM_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
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

}  // namespace fsdp::checkpoint::testing

#endif  // CHECKPOINT_FILES_TESTING_FORWARDING_FILE_SYSTEM_H_
