#include "comm/nccl_event.h"

#include <c10/cuda/CUDAGuard.h>

#include "base/cuda_status.h"
#include "base/status_macros.h"
#include "base/torch_status.h"

namespace fsdp::comm {

absl::StatusOr<std::unique_ptr<NcclEvent>> NcclEvent::Create() {
  int device = 0;
  FSDP_RETURN_IF_ERROR(
      CudaToStatus(cudaGetDevice(&device), "ask for the current GPU"));
  cudaEvent_t event = nullptr;
  FSDP_RETURN_IF_ERROR(
      CudaToStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                   "create a CUDA event"));
  return std::unique_ptr<NcclEvent>(new NcclEvent(
      event, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device))));
}

// Fails where the whole device has, of which other calls tell.
NcclEvent::~NcclEvent() {
  TorchToStatus("destroy a CUDA event", [this] {
    const c10::cuda::CUDAGuard guard(device_);
    static_cast<void>(cudaEventDestroy(event_));
  }).IgnoreError();
}

absl::Status NcclEvent::Record(cudaStream_t stream) {
  return CudaToStatus(cudaEventRecord(event_, stream), "record a CUDA event");
}

absl::StatusOr<bool> NcclEvent::IsDone() const {
  cudaError_t result = cudaSuccess;
  FSDP_RETURN_IF_ERROR(TorchToStatus("look after a GPU", [&] {
    const c10::cuda::CUDAGuard guard(device_);
    result = cudaEventQuery(event_);
  }));
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
