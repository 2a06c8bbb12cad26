// A point in a CUDA stream.
#ifndef COMM_NCCL_NCCL_EVENT_H_
#define COMM_NCCL_NCCL_EVENT_H_

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

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

#endif  // COMM_NCCL_NCCL_EVENT_H_
