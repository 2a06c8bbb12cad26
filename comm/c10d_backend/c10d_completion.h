// When the works of a c10d backend are done, for backends whose works make the
// host wait and for those whose works make a stream wait.
#ifndef COMM_C10D_BACKEND_C10D_COMPLETION_H_
#define COMM_C10D_BACKEND_C10D_COMPLETION_H_

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/device_streams.h"

namespace c10d {
class Work;
}

namespace fsdp::comm {

// What becomes of one work. Thread-safe once Run() has returned.
class C10dCompletion {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // `finish` comes behind `work` and may be empty; without `work`, too.
  C10dCompletion(WorkPtr work, std::function<void()> finish);
  ~C10dCompletion();

  // Waits for the work as it makes one wait, has `side` do the rest. Once.
  void Run(SideStream& side);

  // Whether all has been done; the work's error, also before Run() is over.
  absl::StatusOr<bool> IsDone() const;

  // Whether nothing uses the tensors any more, be it for an error.
  bool HasLetGo() const;

  // Makes the current stream wait. After Run().
  absl::Status BlockCurrentStream() const;

  bool has_run() const { return has_run_.load(std::memory_order_acquire); }

 private:
  absl::Status ErrorOfWork() const;

  const WorkPtr work_;
  std::function<void()> finish_;
  DeviceEvent done_;
  absl::Status status_;
  std::atomic<bool> has_run_{false};  // the two above are there
};

// Runs completions in order: at once where works make a stream wait, on a
// thread where they make the host wait.
class C10dCompletionQueue {
 public:
  // Throws a StatusError where no thread can be started.
  C10dCompletionQueue(c10::Device device, bool host_waits);
  // Calls Stop(absl::ZeroDuration()).
  ~C10dCompletionQueue();

  void Add(std::shared_ptr<C10dCompletion> completion);

  // Ends the thread; one that is stuck in the backend after `patience` is left
  // behind.
  void Stop(absl::Duration patience);

 private:
  // Shared with the thread.
  struct State {
    explicit State(c10::Device device);

    void Run();

    SideStream side;
    absl::Mutex mutex;
    std::deque<std::shared_ptr<C10dCompletion>> queue ABSL_GUARDED_BY(mutex);
    bool stopping ABSL_GUARDED_BY(mutex) = false;
    bool ended ABSL_GUARDED_BY(mutex) = false;
  };

  const std::shared_ptr<State> state_;
  std::thread thread_;  // where the host waits
};

}  // namespace fsdp::comm

#endif  // COMM_C10D_BACKEND_C10D_COMPLETION_H_
