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
#include "comm/communicator.h"
#include "comm/group/failure_report.h"
#include "comm/group/operation_watchdog.h"

namespace c10d {
class Store;
class Work;
}  // namespace c10d

namespace fsdp::comm {

// Knows when one work of a c10d backend is done, be it one that makes the host
// wait or one that makes a stream wait. Thread-safe once Run() has returned.
class C10dCompletion {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // `finish` runs after `work`. Each of them may be empty.
  C10dCompletion(WorkPtr work, std::function<void()> finish);
  ~C10dCompletion();

  // Lets the host or the stream of `side` wait for the work, as the backend has
  // it, and calls `finish` on that stream. Call it once.
  void Run(SideStream& side);

  // Returns true once all is done, or the work's error, even before Run() is
  // over.
  absl::StatusOr<bool> IsDone() const;

  // True once nothing uses the tensors any more, even after an error.
  bool HasLetGo() const;

  // Makes the current stream wait. Call it after Run().
  absl::Status BlockCurrentStream() const;

  bool has_run() const { return has_run_.load(std::memory_order_acquire); }

 private:
  const WorkPtr work_;
  std::function<void()> finish_;
  DeviceEvent done_;
  absl::Status status_;
  std::atomic<bool> has_run_{false};  // the two above are set
};

// Runs completions in order: at once if works make a stream wait, on a thread
// if they make the host wait.
class C10dCompletionQueue {
 public:
  // Throws a StatusError if no thread can be started.
  C10dCompletionQueue(c10::Device device, bool host_waits);
  // Calls Stop(absl::ZeroDuration()).
  ~C10dCompletionQueue();

  void Add(std::shared_ptr<C10dCompletion> completion);

  // Ends the thread, or leaves it behind if it is stuck in the backend for
  // longer than `patience`.
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

// A failure ends the group: the backend is closed, and the peers hear of it by
// the store. Thread-safe, except that the caller orders the calls of Launch().
class C10dBackendGroup {
 public:
  struct Options {
    WatchedGroup::Options watched;
    c10::Device device = c10::Device(c10::DeviceType::CPU);
    bool host_waits = true;              // in the backend's Work::wait()
    std::function<bool()> is_capturing;  // may be empty: never
    std::function<void()> close;         // ends all operations
    std::function<void()> leave;         // called when idle; may be empty
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
  // Calls the backend. Returns nullptr if there is nothing to do.
  using Start = absl::FunctionRef<WorkPtr(c10d::Backend&)>;
  // Runs after the work, in any thread. May be empty.
  using Finish = std::function<void()>;

  // No other group uses `store`.
  static absl::StatusOr<std::shared_ptr<C10dBackendGroup>> Create(
      c10::intrusive_ptr<c10d::Backend> backend,
      const c10::intrusive_ptr<c10d::Store>& store, Options options);

  // Calls Leave().
  ~C10dBackendGroup();

  // Leaves the group: ends all operations, which fails the peers' operations
  // that need this rank.
  void Leave();

  int rank() const { return watched_.rank(); }
  int world_size() const { return watched_.world_size(); }
  const RankNames& names() const { return watched_.names(); }
  absl::Duration timeout() const { return watched_.timeout(); }

  // Starts the next operation. Unimplemented: the backend has no such
  // operation; the group stays as it was. The watchdog takes an operation that
  // is captured into a graph for done; only BlockCurrentStream() may wait for
  // it.
  absl::StatusOr<std::shared_ptr<Operation>> Launch(Call call, int64_t bytes,
                                                    Start start, Finish finish);

  // These do what Work's methods do. Wait() returns FailedPrecondition for an
  // operation that is captured.
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

  // Returns how much longer the backend may take to release buffers.
  absl::Duration Patience();
  void AwaitLetGo(const C10dCompletion& completion);
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
