#include "comm/nccl_event.h"

#include "base/cuda_status.h"
#include "base/status_macros.h"

namespace fsdp::comm {

absl::StatusOr<std::unique_ptr<NcclEvent>> NcclEvent::Create() {
  cudaEvent_t event = nullptr;
  FSDP_RETURN_IF_ERROR(
      CudaToStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                   "create a CUDA event"));
  return std::unique_ptr<NcclEvent>(new NcclEvent(event));
}

// Fails where the whole device has, of which other calls tell.
NcclEvent::~NcclEvent() { static_cast<void>(cudaEventDestroy(event_)); }

absl::Status NcclEvent::Record(cudaStream_t stream) {
  return CudaToStatus(cudaEventRecord(event_, stream), "record a CUDA event");
}

absl::StatusOr<bool> NcclEvent::IsDone() const {
  const cudaError_t result = cudaEventQuery(event_);
  if (result == cudaErrorNotReady) {
    // Not for the next one who asks for the last error.
    static_cast<void>(cudaGetLastError());
    return false;
  }
  FSDP_RETURN_IF_ERROR(CudaToStatus(result, "an operation on the device"));
  return true;
}

absl::Status NcclEvent::Block(cudaStream_t stream) const {
  return CudaToStatus(cudaStreamWaitEvent(stream, event_, 0),
                      "make a CUDA stream wait");
}

}  // namespace fsdp::comm
