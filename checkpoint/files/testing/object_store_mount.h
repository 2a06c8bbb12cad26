// A file system that refuses what a mounted object store refuses.
#ifndef CHECKPOINT_FILES_TESTING_OBJECT_STORE_MOUNT_H_
#define CHECKPOINT_FILES_TESTING_OBJECT_STORE_MOUNT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/forwarding_file_system.h"

namespace fsdp::checkpoint::testing {

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

#endif  // CHECKPOINT_FILES_TESTING_OBJECT_STORE_MOUNT_H_
