// Starts threads of the library.
#ifndef BASE_START_THREAD_H_
#define BASE_START_THREAD_H_

#include <deque>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace fsdp {

// Runs `body` on a new thread. ResourceExhausted: the system starts none, and
// `body` is dropped; the error tells the `purpose` ("to connect") and the
// limits.
absl::StatusOr<std::thread> StartThread(absl::string_view purpose,
                                        absl::AnyInvocable<void() &&> body);
// Is deleted because the result of `body` would be lost.
template <typename Fn,
          std::enable_if_t<!std::is_void_v<std::invoke_result_t<Fn>>, int> = 0>
absl::StatusOr<std::thread> StartThread(absl::string_view purpose,
                                        Fn body) = delete;

// Tells how many threads this process may have, for the text of an error: "this
// user may have 128 processes and threads (ulimit -u), ...".
std::string ThreadLimits();

// Threads that wait for a disk while the caller computes. They do jobs, which
// begin in the order of Run().
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

}  // namespace fsdp

#endif  // BASE_START_THREAD_H_
