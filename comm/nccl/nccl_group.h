// One rank's end of a group whose operations run on a stream of its own.
#ifndef COMM_NCCL_NCCL_GROUP_H_
#define COMM_NCCL_NCCL_GROUP_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "comm/call.h"
#include "comm/group/failure_report.h"
#include "comm/group/watched_group.h"
#include "comm/nccl/nccl_handle.h"

// A point in a CUDA stream.

namespace fsdp::comm {

// Belongs to the CUDA device that is current where it is made. IsDone() and the
// destructor may be called with any device as the current one: CUDA sets up
// none but its own.
class NcclEvent {
 public:
  static absl::StatusOr<std::unique_ptr<NcclEvent>> Create();
  ~NcclEvent();
  NcclEvent(const NcclEvent&) = delete;
  NcclEvent& operator=(const NcclEvent&) = delete;

  // Stands for what `stream` has been given so far.
  absl::Status Record(cudaStream_t stream);

  // Whether that is done; does not block. Of a point that has not been captured
  // into a graph, but also while streams are being captured, by this thread or
  // another.
  absl::StatusOr<bool> IsDone() const;

  // What `stream` is given from now on waits for it; does not block the host.
  absl::Status Block(cudaStream_t stream) const;

 private:
  NcclEvent(cudaEvent_t event, c10::Device device)
      : event_(event), device_(device) {}

  const cudaEvent_t event_;
  const c10::Device device_;
};

// Events of one device that are used again: to make one costs as much as all
// else that an operation needs of CUDA. Thread-safe.
class NcclEventPool : public std::enable_shared_from_this<NcclEventPool> {
 public:
  // Not in use; comes back with the last reference. The device has to be the
  // current one.
  absl::StatusOr<std::shared_ptr<NcclEvent>> Take();

 private:
  void GiveBack(std::unique_ptr<NcclEvent> event);

  absl::Mutex mutex_;
  std::vector<std::unique_ptr<NcclEvent>> free_ ABSL_GUARDED_BY(mutex_);
};

// Whether what `stream`, of the current device, is given is captured into a
// CUDA graph.
absl::StatusOr<bool> IsBeingCaptured(cudaStream_t stream);

}  // namespace fsdp::comm

namespace c10d {
class Store;
}

namespace fsdp::comm {

// A failure ends the group: what runs on the device is aborted, and peers hear
// of it through the store. Thread-safe, but for Launch(), whose calls are
// ordered by the caller.
class NcclGroup {
 public:
  // What has been given to the stream; with it, its errors can be told.
  class Operation {
   public:
    Operation(std::shared_ptr<WatchedGroup::Operation> entry,
              std::shared_ptr<const NcclEvent> done, bool is_captured)
        : entry_(std::move(entry)),
          done_(std::move(done)),
          is_captured_(is_captured) {}

   private:
    friend class NcclGroup;

    const std::shared_ptr<WatchedGroup::Operation> entry_;
    const std::shared_ptr<const NcclEvent> done_;
    const bool is_captured_;
  };

  // Enqueues one operation of NCCL.
  using Enqueue = absl::FunctionRef<ncclResult_t(ncclComm_t, cudaStream_t)>;
  // Enqueues LibTorch's operations behind it, on the current stream.
  using Finish = absl::FunctionRef<void()>;

  // `handle` is the rank's on `device`, a GPU; no other group uses `store`.
  static absl::StatusOr<std::shared_ptr<NcclGroup>> Create(
      std::unique_ptr<NcclHandle> handle, c10::Device device,
      const c10::intrusive_ptr<c10d::Store>& store,
      const WatchedGroup::Options& options);

  // Calls Leave().
  ~NcclGroup();

  // Makes no more calls: what does not come to an end in a few seconds is
  // aborted, and the peers' operations that need this rank fail.
  void Leave();

  int rank() const { return watched_.rank(); }
  int world_size() const { return watched_.world_size(); }
  const RankNames& names() const { return watched_.names(); }
  c10::Device device() const { return device_; }
  absl::Duration timeout() const { return watched_.timeout(); }
  bool failed() const { return watched_.failed(); }
  NcclHandle& handle() { return *handle_; }

  // Runs behind what the current stream of the device has been given so far.
  // While that is being captured, so is the operation: to the watchdog it is
  // done, and BlockCurrentStream() is what can be done with it. Of CUDA, this
  // asks for the capture's state, records two events and makes a stream wait;
  // it makes an event where more operations are in flight than ever before.
  absl::StatusOr<std::shared_ptr<Operation>> Launch(Call call, int64_t bytes,
                                                    Enqueue enqueue,
                                                    Finish finish);

  // Whether the current stream of the device is being captured.
  absl::StatusOr<bool> IsBeingCaptured() const;

  // As the methods of Work. FailedPrecondition: to wait for a captured one.
  absl::Status Wait(const Operation& operation, absl::Time deadline);
  absl::Status BlockCurrentStream(const Operation& operation);

  // Keeps `tensors` until the device is done with `operation`.
  void Keep(const Operation& operation, std::vector<at::Tensor> tensors);

  // Fails the group on this rank's behalf. When Fail() returns, nothing runs on
  // the device any more.
  void Abort(const absl::Status& reason);
  void Fail(const absl::Status& status);

 private:
  NcclGroup(std::unique_ptr<NcclHandle> handle, c10::Device device,
            std::unique_ptr<ReportExchange> reports,
            const WatchedGroup::Options& options);

  absl::Status CreateStream();
  absl::StatusOr<std::shared_ptr<Operation>> Run(
      std::shared_ptr<WatchedGroup::Operation> entry, Enqueue enqueue,
      Finish finish);

  const std::unique_ptr<NcclHandle> handle_;
  const c10::Device device_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<NcclEvent> ready_;  // the current stream's, for stream_
  const std::shared_ptr<NcclEventPool> events_ =
      std::make_shared<NcclEventPool>();
  // The last, so that its threads end first.
  WatchedGroup watched_;
};

}  // namespace fsdp::comm

#endif  // COMM_NCCL_NCCL_GROUP_H_
