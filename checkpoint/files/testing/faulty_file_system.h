// A file system that fails, or whose process is as if killed, at a call.
#ifndef CHECKPOINT_FILES_TESTING_FAULTY_FILE_SYSTEM_H_
#define CHECKPOINT_FILES_TESTING_FAULTY_FILE_SYSTEM_H_

#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/forwarding_file_system.h"

namespace fsdp::checkpoint::testing {

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

}  // namespace fsdp::checkpoint::testing

#endif  // CHECKPOINT_FILES_TESTING_FAULTY_FILE_SYSTEM_H_
