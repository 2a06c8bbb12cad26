// A file system whose changes a test hears of before they are made.
#ifndef CHECKPOINT_TESTS_WATCHED_FILE_SYSTEM_H_
#define CHECKPOINT_TESTS_WATCHED_FILE_SYSTEM_H_

#include <functional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "base/files/file_system.h"
#include "base/files/testing/forwarding_file_system.h"

namespace fsdp::checkpoint::testing {

// Thread-safe if the function is.
class WatchedFileSystem : public ::fsdp::testing::ForwardingFileSystem {
 public:
  // As the hook of that name.
  using OnChange = std::function<absl::Status(absl::string_view what,
                                              const std::string& path)>;

  // As the hook of that name; or null.
  using OnWrite = std::function<void(const std::string& path, int64_t offset,
                                     int64_t bytes)>;

  WatchedFileSystem(FileSystem& base, OnChange on_change,
                    OnWrite on_write = nullptr)
      : ::fsdp::testing::ForwardingFileSystem(base),
        on_change_(std::move(on_change)),
        on_write_(std::move(on_write)) {}

 private:
  absl::Status BeforeChange(absl::string_view what,
                            const std::string& path) override {
    return on_change_(what, path);
  }
  absl::Status BeforeWrite(const std::string& path, int64_t offset,
                           int64_t bytes) override {
    if (on_write_ != nullptr) on_write_(path, offset, bytes);
    return absl::OkStatus();
  }

  const OnChange on_change_;
  const OnWrite on_write_;
};

// Writes that wait until the test lets them. Thread-safe.
class WriteGate {
 public:
  // For a WatchedFileSystem.
  absl::Status Pass(absl::string_view what) {
    if (what != "write") return absl::OkStatus();
    const auto is_open = [this]() { return !closed_; };
    absl::MutexLock lock(&mutex_);
    ++came_;
    mutex_.Await(absl::Condition(&is_open));
    return absl::OkStatus();
  }

  void Hold() {
    absl::MutexLock lock(&mutex_);
    if (!closed_) came_ = 0;
    closed_ = true;
  }

  void Release() {
    absl::MutexLock lock(&mutex_);
    closed_ = false;
  }

  // Blocks until a write has come since Hold(). It is held unless Release() was
  // called.
  void AwaitHeld() {
    const auto holds = [this]() { return came_ > 0; };
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&holds));
  }

 private:
  absl::Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  int came_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace fsdp::checkpoint::testing

#endif  // CHECKPOINT_TESTS_WATCHED_FILE_SYSTEM_H_
