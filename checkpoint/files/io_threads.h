// Threads that wait for the disk while somebody else computes.
#ifndef CHECKPOINT_FILES_IO_THREADS_H_
#define CHECKPOINT_FILES_IO_THREADS_H_

#include <deque>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"

namespace fsdp::checkpoint {

// Runs jobs, which begin in the order of Run(). Thread-safe.
class IoThreads {
 public:
  // As many as can be started; without any, Run() does the job itself.
  explicit IoThreads(int count);
  IoThreads(const IoThreads&) = delete;
  IoThreads& operator=(const IoThreads&) = delete;
  ~IoThreads();  // after all jobs

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

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FILES_IO_THREADS_H_
