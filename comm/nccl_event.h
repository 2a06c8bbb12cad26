// A point in a CUDA stream.
#ifndef COMM_NCCL_EVENT_H_
#define COMM_NCCL_EVENT_H_

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

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

  // Whether that is done; does not block.
  absl::StatusOr<bool> IsDone() const;

  // What `stream` is given from now on waits for it; does not block the host.
  absl::Status Block(cudaStream_t stream) const;

 private:
  NcclEvent(cudaEvent_t event, c10::Device device)
      : event_(event), device_(device) {}

  const cudaEvent_t event_;
  const c10::Device device_;
};

}  // namespace fsdp::comm

#endif  // COMM_NCCL_EVENT_H_
