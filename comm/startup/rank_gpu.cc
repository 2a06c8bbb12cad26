#include "comm/startup/rank_gpu.h"

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/cuda_status.h"
#include "base/status_macros.h"

namespace fsdp::comm {

absl::StatusOr<c10::Device> FindGpu(std::optional<int> index) {
  int num_devices = 0;
  FSDP_RETURN_IF_ERROR(
      CudaToStatus(cudaGetDeviceCount(&num_devices), "look for a GPU"));
  int gpu = index.value_or(0);
  if (!index.has_value()) {
    FSDP_RETURN_IF_ERROR(
        CudaToStatus(cudaGetDevice(&gpu), "ask for the current GPU"));
  }
  if (gpu < 0 || gpu >= num_devices) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is no GPU ", gpu, ": this process sees ",
                     num_devices, "; see CUDA_VISIBLE_DEVICES"));
  }
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(gpu));
}

absl::StatusOr<int> TakeGpu(std::optional<int> index, int local_rank) {
  int num_gpus = 0;
  FSDP_RETURN_IF_ERROR(
      CudaToStatus(cudaGetDeviceCount(&num_gpus), "look for a GPU"));
  if (num_gpus == 0) {
    return absl::FailedPreconditionError(
        "this process sees no GPU; see CUDA_VISIBLE_DEVICES");
  }
  const int gpu = index.value_or(local_rank % num_gpus);
  FSDP_RETURN_IF_ERROR(CudaToStatus(
      cudaSetDevice(gpu), absl::StrCat("make GPU ", gpu, " the current one")));
  return gpu;
}

}  // namespace fsdp::comm
