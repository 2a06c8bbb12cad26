#include "comm/startup/rank_gpu.h"

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/cuda_status.h"
#include "base/status_macros.h"

namespace fsdp::comm {

absl::StatusOr<c10::Device> FindGpu(int index) {
  int num_devices = 0;
  FSDP_RETURN_IF_ERROR(
      CudaToStatus(cudaGetDeviceCount(&num_devices), "look for a GPU"));
  if (index < 0) {
    FSDP_RETURN_IF_ERROR(
        CudaToStatus(cudaGetDevice(&index), "ask for the current GPU"));
  }
  if (index >= num_devices) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is no GPU ", index, ": this process sees ",
                     num_devices, "; see CUDA_VISIBLE_DEVICES"));
  }
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
}

absl::StatusOr<int> TakeGpu(int index, int local_rank) {
  int num_gpus = 0;
  FSDP_RETURN_IF_ERROR(
      CudaToStatus(cudaGetDeviceCount(&num_gpus), "look for a GPU"));
  if (num_gpus == 0) {
    return absl::FailedPreconditionError(
        "this process sees no GPU; see CUDA_VISIBLE_DEVICES");
  }
  if (index < 0) index = local_rank % num_gpus;
  FSDP_RETURN_IF_ERROR(
      CudaToStatus(cudaSetDevice(index),
                   absl::StrCat("make GPU ", index, " the current one")));
  return index;
}

}  // namespace fsdp::comm
