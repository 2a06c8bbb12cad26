// Threads that wait for the disk while the caller computes.
#ifndef CHECKPOINT_FILES_IO_THREADS_H_
#define CHECKPOINT_FILES_IO_THREADS_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace fsdp::checkpoint {

// Runs jobs, which begin in the order of Run(). Thread-safe.
class IoThreads {
 public:
  // Starts up to `count` threads; if none can be started, Run() does the job.
  explicit IoThreads(int count);
  IoThreads(const IoThreads&) = delete;
  IoThreads& operator=(const IoThreads&) = delete;
  ~IoThreads();  // returns after all jobs

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

// Limits bytes per second.

struct PaceOptions {
  int64_t bytes_per_second = 0;  // 0: no limit
  // Once it is true, calls return Cancelled. The thread that writes reads it.
  // If null, nothing is cancelled.
  const std::atomic<bool>* cancelled = nullptr;
  // Tests replace the time; null means the machine's.
  std::function<absl::Time()> now;
  std::function<void(absl::Duration)> sleep;
};

// Thread-compatible.
class Pace {
 public:
  explicit Pace(PaceOptions options);

  // Cancelled, or OK.
  absl::Status CheckCancelled() const;
  // Blocks until all bytes taken before are paid for. Cancelled.
  absl::Status Take(int64_t bytes);

 private:
  const PaceOptions options_;
  absl::Time free_at_ = absl::InfinitePast();
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FILES_IO_THREADS_H_
