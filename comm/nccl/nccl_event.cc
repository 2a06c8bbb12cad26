#include "comm/nccl/nccl_event.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <utility>

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
    // Otherwise a capture may forbid it, and fails itself.
    const c10::cuda::CUDAStreamCaptureModeGuard beside_captures(
        cudaStreamCaptureModeRelaxed);
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

absl::StatusOr<std::shared_ptr<NcclEvent>> NcclEventPool::Take() {
  std::unique_ptr<NcclEvent> event;
  {
    absl::MutexLock lock(&mutex_);
    if (!free_.empty()) {
      event = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (event == nullptr) {
    FSDP_ASSIGN_OR_RETURN(event, NcclEvent::Create());
  }
  return std::shared_ptr<NcclEvent>(
      event.release(), [pool = shared_from_this()](NcclEvent* used) {
        pool->GiveBack(std::unique_ptr<NcclEvent>(used));
      });
}

void NcclEventPool::GiveBack(std::unique_ptr<NcclEvent> event) {
  absl::MutexLock lock(&mutex_);
  free_.push_back(std::move(event));
}

absl::StatusOr<bool> IsBeingCaptured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  FSDP_RETURN_IF_ERROR(
      CudaToStatus(cudaStreamIsCapturing(stream, &status),
                   "ask whether a CUDA stream is being captured"));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace fsdp::comm
