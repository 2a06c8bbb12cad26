// One rank's end of a group whose operations a c10d backend carries out.
#ifndef COMM_C10D_BACKEND_C10D_BACKEND_GROUP_H_
#define COMM_C10D_BACKEND_C10D_BACKEND_GROUP_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/device_streams.h"
#include "comm/call.h"
#include "comm/group/failure_report.h"
#include "comm/group/watched_group.h"

// When the works of a c10d backend are done, for backends whose works make the
// host wait and for those whose works make a stream wait.

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

namespace c10d {
class Store;
}

namespace fsdp::comm {

// A failure ends the group: the backend is closed, and peers hear of it through
// the store. Thread-safe, but for Launch(), whose calls are ordered by the
// caller.
class C10dBackendGroup {
 public:
  struct Options {
    RankNames names;
    c10::Device device = c10::Device(c10::DeviceType::CPU);
    bool host_waits = true;  // in the backend's Work::wait()
    absl::Duration timeout = absl::Minutes(5);
    absl::Duration diagnosis_timeout = absl::Seconds(2);
    std::function<bool()> is_capturing;  // may be empty: never
    std::function<void()> close;         // ends what runs
    std::function<void()> leave;         // when nothing runs; may be empty
  };

  class Operation {
   public:
    Operation(std::shared_ptr<WatchedGroup::Operation> entry,
              std::shared_ptr<C10dCompletion> completion, bool is_captured)
        : entry_(std::move(entry)),
          completion_(std::move(completion)),
          is_captured_(is_captured) {}

   private:
    friend class C10dBackendGroup;

    const std::shared_ptr<WatchedGroup::Operation> entry_;
    const std::shared_ptr<C10dCompletion> completion_;
    const bool is_captured_;
  };

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  // Calls the backend; nullptr where there is nothing to do.
  using Start = absl::FunctionRef<WorkPtr(c10d::Backend&)>;
  // What LibTorch does behind it, by this rank's thread or another.
  using Finish = std::function<void()>;

  // No other group uses `store`.
  static absl::StatusOr<std::shared_ptr<C10dBackendGroup>> Create(
      c10::intrusive_ptr<c10d::Backend> backend,
      const c10::intrusive_ptr<c10d::Store>& store, Options options);

  // Calls Leave().
  ~C10dBackendGroup();

  // Makes no more calls: what runs is ended, and the peers' operations that
  // need this rank fail.
  void Leave();

  int rank() const { return watched_.rank(); }
  int world_size() const { return watched_.world_size(); }
  const RankNames& names() const { return watched_.names(); }
  c10::Device device() const { return options_.device; }
  absl::Duration timeout() const { return watched_.timeout(); }

  // The next operation. Unimplemented, which leaves the group as it is: the
  // backend has no such operation. What is captured into a graph is done to the
  // watchdog, and BlockCurrentStream() is what can be done with it.
  absl::StatusOr<std::shared_ptr<Operation>> Launch(Call call, int64_t bytes,
                                                    Start start, Finish finish);

  // As the methods of Work. FailedPrecondition: to wait for a captured one.
  absl::Status Wait(const Operation& operation, absl::Time deadline);
  absl::Status BlockCurrentStream(const Operation& operation);

  // Keeps `tensors` until `operation` is done.
  void Keep(const Operation& operation, std::vector<at::Tensor> tensors);

  // Fails the group on this rank's behalf.
  void Abort(const absl::Status& reason);

 private:
  C10dBackendGroup(c10::intrusive_ptr<c10d::Backend> backend,
                   std::unique_ptr<ReportExchange> reports, Options options);

  struct Kept;

  // How much longer the backend may take to let go.
  absl::Duration Patience();
  void AwaitLetGo(const C10dCompletion& completion);
  void CloseBackend();
  void EnterDevice();

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const Options options_;
  C10dCompletionQueue completions_;
  absl::Mutex mutex_;
  std::optional<absl::Time> closed_at_ ABSL_GUARDED_BY(mutex_);
  // The last, so that its threads end first.
  WatchedGroup watched_;
};

}  // namespace fsdp::comm

#endif  // COMM_C10D_BACKEND_C10D_BACKEND_GROUP_H_
