// One rank's end of a group whose operations run on a stream of its own, and
// device memory that NCCL can use without copies.
#ifndef COMM_NCCL_NCCL_GROUP_H_
#define COMM_NCCL_NCCL_GROUP_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "comm/group/failure_report.h"
#include "comm/group/operation_watchdog.h"
#include "comm/nccl/nccl_handle.h"

namespace fsdp::comm {

// A point in a CUDA stream of the device that is current in Create(). IsDone()
// and the destructor may be called with any current device, and initialise no
// other one.
class NcclEvent {
 public:
  static absl::StatusOr<std::unique_ptr<NcclEvent>> Create();
  ~NcclEvent();
  NcclEvent(const NcclEvent&) = delete;
  NcclEvent& operator=(const NcclEvent&) = delete;

  // Moves the point behind all work that `stream` has been given so far.
  absl::Status Record(cudaStream_t stream);

  // Returns true once the device has passed the point; does not block. The
  // point may not have been captured into a graph, but any thread may be
  // capturing streams meanwhile.
  absl::StatusOr<bool> IsDone() const;

  // Makes later work of `stream` wait for the point. Does not block the host.
  absl::Status Block(cudaStream_t stream) const;

 private:
  NcclEvent(cudaEvent_t event, c10::Device device)
      : event_(event), device_(device) {}

  const cudaEvent_t event_;
  const c10::Device device_;
};

// Reuses events of one device, since making one costs as much as all other CUDA
// calls of an operation together. Thread-safe.
class NcclEventPool : public std::enable_shared_from_this<NcclEventPool> {
 public:
  // Returns an event that is not in use. It comes back with its last reference.
  // The device has to be the current one.
  absl::StatusOr<std::shared_ptr<NcclEvent>> Take();

 private:
  absl::Mutex mutex_;
  std::vector<std::unique_ptr<NcclEvent>> free_ ABSL_GUARDED_BY(mutex_);
};

// A failure ends the group: operations on the device are aborted, and the peers
// hear of it by the store. Thread-safe, except that the caller orders the calls
// of Launch().
class NcclGroup {
 public:
  // An operation that has been given to the stream.
  struct Operation {
    std::shared_ptr<WatchedGroup::Operation> entry;
    std::shared_ptr<const NcclEvent> done;
    bool is_captured;
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

  // Leaves the group: aborts operations that are not done within a few seconds,
  // which fails the peers' operations that need this rank.
  void Leave();

  int rank() const { return watched_.rank(); }
  int world_size() const { return watched_.world_size(); }
  const RankNames& names() const { return watched_.names(); }
  c10::Device device() const { return device_; }
  absl::Duration timeout() const { return watched_.timeout(); }
  bool failed() const { return watched_.failed(); }
  NcclHandle& handle() { return *handle_; }

  // Starts an operation, which runs after all work that the current stream of
  // the device has been given so far. If that stream is being captured, so is
  // the operation: the watchdog takes it for done, and only
  // BlockCurrentStream() may wait for it. Of CUDA's functions, this asks for
  // the state of the capture, records two events and makes a stream wait. It
  // makes an event only when more operations are in flight than ever before.
  absl::StatusOr<std::shared_ptr<Operation>> Launch(Call call, int64_t bytes,
                                                    Enqueue enqueue,
                                                    Finish finish);

  // True while the current stream of the device is being captured.
  absl::StatusOr<bool> IsBeingCaptured() const;

  // These do what Work's methods do. Wait() returns FailedPrecondition for an
  // operation that is captured.
  absl::Status Wait(const Operation& operation, absl::Time deadline);
  absl::Status BlockCurrentStream(const Operation& operation);

  // Keeps `tensors` until the device is done with `operation`.
  void Keep(const Operation& operation, std::vector<at::Tensor> tensors);

  // Both fail the group on behalf of this rank. When Fail() returns, nothing of
  // the group runs on the device any more.
  void Abort(const absl::Status& reason) { watched_.Abort(reason); }
  void Fail(const absl::Status& status) { watched_.Fail(status); }

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
  std::unique_ptr<NcclEvent> ready_;  // of the caller's stream; stream_ waits
  const std::shared_ptr<NcclEventPool> events_ =
      std::make_shared<NcclEventPool>();
  // The last, so that its threads end first.
  WatchedGroup watched_;
};

// True if the NCCL that this process runs with has windows (2.27).
bool HasNcclWindows();
// True if ncclCommAbort() also ends kernels of symmetric windows (2.29.7, from
// which on their barriers in NCCL's source look at the flag of an abort).
bool HasAbortableNcclWindows();

// Memory of ncclMemAlloc(). The destructor frees it: it waits for the device,
// up to the group's timeout, or a few seconds if the group has failed. Memory
// that is in use for longer is never freed.
class NcclMemory {
 public:
  // Allocates `bytes` > 0 on the group's device. ResourceExhausted: NCCL cannot
  // allocate them.
  static absl::StatusOr<std::shared_ptr<NcclMemory>> Allocate(
      std::shared_ptr<NcclGroup> group, int64_t bytes);
  ~NcclMemory();
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;

  // Makes it a window of the group. Collective: all ranks have HasNcclWindows()
  // and pass the same `is_symmetric`. It does nothing on a machine that does
  // not gain from windows. Errors are those of NcclHandle::Call(): if NCCL
  // refuses the window, the group can still be used.
  absl::Status Register(bool is_symmetric);

  // Returns all of it as uint8. The tensor keeps `memory` alive.
  static at::Tensor AsTensor(const std::shared_ptr<NcclMemory>& memory);

 private:
  NcclMemory(std::shared_ptr<NcclGroup> group, void* data, int64_t bytes);

  const std::shared_ptr<NcclGroup> group_;
  void* const data_;
  const int64_t bytes_;
  // NCCL writes to it as long as a registration is in progress.
  const std::shared_ptr<ncclWindow_t> window_;
};

// The steps of one rank.
struct WindowSteps {
  absl::FunctionRef<absl::Status()> allocate;
  // Collective among ranks that have allocated. Aborted and DeadlineExceeded
  // end the group; other errors do it no harm.
  absl::FunctionRef<absl::Status()> register_window;
  // Collective. Returns true if `mine` is true on every rank.
  absl::FunctionRef<absl::StatusOr<bool>(bool mine)> true_on_all;
};

enum class WindowOutcome {
  kWindow,
  kNoMemory,  // a rank could not allocate this window
  kRefused,   // NCCL refused a rank, and would refuse other windows, too
};

// Gives all ranks of a group a window, or none. Collective. All ranks return
// the same, except errors, which end the group.
absl::StatusOr<WindowOutcome> AgreeOnWindow(const WindowSteps& steps);

}  // namespace fsdp::comm

#endif  // COMM_NCCL_NCCL_GROUP_H_
