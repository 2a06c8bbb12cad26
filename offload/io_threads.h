// Threads that wait for a disk while the caller computes.
#ifndef OFFLOAD_IO_THREADS_H_
#define OFFLOAD_IO_THREADS_H_

#include <deque>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace fsdp::offload {

// Does jobs, which begin in the order of Run().
class IoThreads {
 public:
  IoThreads() = default;
  IoThreads(const IoThreads&) = delete;
  IoThreads& operator=(const IoThreads&) = delete;
  ~IoThreads();  // returns after all jobs

  // Starts up to `count` threads; call it once, before Run(). An error, which
  // tells the `purpose`, if none can be started: then Run() does the job.
  absl::Status Start(absl::string_view purpose, int count);
  int size() const { return static_cast<int>(threads_.size()); }

  // Thread-safe.
  void Run(absl::AnyInvocable<void()> job);

 private:
  void Work();
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || !jobs_.empty();
  }

  absl::Mutex mutex_;
  std::deque<absl::AnyInvocable<void()>> jobs_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_IO_THREADS_H_
