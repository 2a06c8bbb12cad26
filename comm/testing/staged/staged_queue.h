// Runs collectives on a device's tensors one after the other, by a thread, as
// collectives on host memory.
#ifndef COMM_TESTING_STAGED_STAGED_QUEUE_H_
#define COMM_TESTING_STAGED_STAGED_QUEUE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/device_streams.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// A collective on a buffer in host memory, with the copies to it and back.
struct StagedCall {
  // A tensor of the device and its place in the buffer. Undefined: no copy.
  struct Part {
    at::Tensor tensor;
    int64_t begin = 0;  // in elements
  };

  std::string name;  // "all-gather of blocks.3 on rank 1 of 4"
  at::ScalarType dtype = at::kFloat;
  int64_t size = 0;  // of the buffer, in elements
  Part source;
  Part target;
  std::function<StartedWork(Communicator& host, const at::Tensor& buffer)> run;
  // Enqueues more work after the copy to `target`; may be empty.
  std::function<void()> finish;
};

// The queue of one rank. Used by one thread at a time, except Abort(), which
// any thread may call. The first failure ends the group; later calls fail with
// the error that `host` gives.
class StagedQueue {
 public:
  // A call that was added.
  class Operation {
   public:
    explicit Operation(StagedCall call)
        : name_(call.name), call_(std::move(call)) {}

   private:
    friend class StagedQueue;

    // Takes the call out, whose tensors are then the caller's again.
    StagedCall Release() { return std::exchange(call_, StagedCall()); }

    const std::string name_;
    StagedCall call_;
    DeviceEvent begin_;  // of the caller's stream
    DeviceEvent end_;    // of the queue's, once it is_enqueued_
    bool is_enqueued_ = false;
    std::optional<absl::Status> result_;  // once it is done
  };

  // Takes tensors on `device`, of the dtypes that `host` takes.
  StagedQueue(std::shared_ptr<Communicator> host, c10::Device device);
  ~StagedQueue();
  StagedQueue(const StagedQueue&) = delete;
  StagedQueue& operator=(const StagedQueue&) = delete;

  // Leaves the group: aborts calls that `host` has not done and destroys it.
  void Leave();

  // Adds a call, which runs after all work that the current stream of the
  // device has been given so far.
  absl::StatusOr<std::shared_ptr<Operation>> Add(StagedCall call);

  // These do what Work's methods do.
  absl::Status Wait(Operation& operation, absl::Time deadline);
  absl::Status BlockCurrentStream(Operation& operation);

  // Splits `host` after the calls so far.
  CreatedCommunicator SplitHost(int color, int key);

  void Abort(const absl::Status& reason);

 private:
  // A copy that still runs, and what it copies.
  struct Unfinished {
    DeviceEvent end;
    StagedCall call;
  };

  void Run();
  std::shared_ptr<Operation> Next();
  absl::Status Execute(Operation& operation);
  absl::Status CopyToHost(Operation& operation);
  absl::Status RunOnHost(const StagedCall& call);
  absl::Status CopyFromHost(Operation& operation);
  absl::Status EnqueueResult(Operation& operation, DeviceEvent& end);
  void Finish(Operation& operation, absl::Status status);

  // Waits for `event`. Returns false if the timeout or a failure came first.
  absl::StatusOr<bool> Poll(const DeviceEvent& event, absl::string_view what);
  at::Tensor Buffer(const StagedCall& call);
  bool HasFailed();
  absl::Status Aborted(absl::string_view what);
  // Ends the group on this rank, without telling the peers.
  void NoteFailure(const absl::Status& status);

  const c10::Device device_;
  const std::string own_name_;  // "rank 1"
  const absl::Duration timeout_;

  // Only the thread uses these.
  SideStream stream_;
  DeviceEvent copied_;
  at::Tensor memory_;
  std::vector<Unfinished> unfinished_;

  absl::Mutex mutex_;
  std::shared_ptr<Communicator> host_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<Operation>> waiting_ ABSL_GUARDED_BY(mutex_);
  int64_t not_done_by_host_ ABSL_GUARDED_BY(mutex_) = 0;
  bool leaving_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);

  std::thread thread_;
};

}  // namespace fsdp::comm

#endif  // COMM_TESTING_STAGED_STAGED_QUEUE_H_
