// One rank's end of a group whose operations run on a stream of its own.
#ifndef COMM_NCCL_GROUP_H_
#define COMM_NCCL_GROUP_H_

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
#include "absl/types/optional.h"
#include "comm/call.h"
#include "comm/group_monitor.h"
#include "comm/nccl_event.h"
#include "comm/nccl_handle.h"
#include "comm/nccl_watchdog.h"

namespace c10d {
class Store;
}

namespace fsdp::comm {

// A failure ends the group: what runs on the device is aborted, and peers hear
// of it through the store. Thread-safe, but for Launch(), whose calls are
// ordered by the caller.
class NcclGroup {
 public:
  struct Options {
    absl::Duration timeout = absl::Minutes(5);
    absl::Duration diagnosis_timeout = absl::Seconds(2);
  };

  // What has been given to the stream; with it, its errors can be told.
  class Operation {
   public:
    Operation(std::shared_ptr<NcclWatchdog::Operation> entry,
              std::shared_ptr<const NcclEvent> done)
        : entry_(std::move(entry)), done_(std::move(done)) {}

   private:
    friend class NcclGroup;

    const std::shared_ptr<NcclWatchdog::Operation> entry_;
    const std::shared_ptr<const NcclEvent> done_;
  };

  // Enqueues one operation of NCCL.
  using Enqueue = absl::FunctionRef<ncclResult_t(ncclComm_t, cudaStream_t)>;
  // Enqueues LibTorch's operations behind it, on the current stream.
  using Finish = absl::FunctionRef<void()>;

  // `handle` is rank `rank`'s on `device`, a GPU; no other group uses `store`.
  static absl::StatusOr<std::shared_ptr<NcclGroup>> Create(
      std::unique_ptr<NcclHandle> handle, c10::Device device, int rank,
      int world_size, const c10::intrusive_ptr<c10d::Store>& store,
      const Options& options);

  // Calls Leave().
  ~NcclGroup();

  // Makes no more calls: what does not come to an end in a few seconds is
  // aborted, and the peers' operations that need this rank fail.
  void Leave();

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  c10::Device device() const { return device_; }
  absl::Duration timeout() const { return options_.timeout; }
  NcclHandle& handle() { return *handle_; }

  // Runs behind what the current stream of the device has been given so far.
  absl::StatusOr<std::shared_ptr<Operation>> Launch(Call call, int64_t bytes,
                                                    Enqueue enqueue,
                                                    Finish finish);

  // As the methods of Work.
  absl::Status Wait(const Operation& operation, absl::Time deadline);
  absl::Status BlockCurrentStream(const Operation& operation);

  // Keeps `tensors` until the device is done with `operation`.
  void Keep(const Operation& operation, std::vector<at::Tensor> tensors);

  // Fails the group on this rank's behalf. When Fail() returns, nothing runs on
  // the device any more.
  void Abort(const absl::Status& reason);
  void Fail(const absl::Status& status);

 private:
  NcclGroup(std::unique_ptr<NcclHandle> handle, c10::Device device, int rank,
            int world_size, const Options& options);

  absl::Status CreateStream();
  absl::StatusOr<std::shared_ptr<const NcclEvent>> Run(
      const NcclWatchdog::Operation& entry, Enqueue enqueue, Finish finish);
  // Until nothing runs, or the group has failed.
  void AwaitIdle(absl::Time deadline);
  void StopDevice(const NcclWatchdog::Failure& failure);
  absl::Status ErrorOf(const NcclWatchdog::Operation& entry);
  absl::Status FindVerdict();

  const std::unique_ptr<NcclHandle> handle_;
  const c10::Device device_;
  const int rank_;
  const int world_size_;
  const Options options_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<NcclEvent> ready_;  // the current stream's, for stream_
  std::unique_ptr<GroupMonitor> monitor_;
  absl::Mutex mutex_;
  bool left_ ABSL_GUARDED_BY(mutex_) = false;
  absl::optional<absl::Status> verdict_ ABSL_GUARDED_BY(mutex_);
  // The last, so that its thread ends first.
  NcclWatchdog watchdog_;
};

}  // namespace fsdp::comm

#endif  // COMM_NCCL_GROUP_H_
