// Captures by CUDA (base/device_streams.h).
#ifndef BASE_CUDA_GRAPH_H_
#define BASE_CUDA_GRAPH_H_

#include <c10/core/Device.h>

#include <memory>

#include "absl/status/statusor.h"
#include "base/device_streams.h"

namespace fsdp {

// An at::cuda::CUDAGraph. Only the thread that captures is held to what CUDA
// allows in a capture: those of autograd and NCCL go on beside it. Random
// numbers of the default generator go on from replay to replay.
// InvalidArgument: not a GPU.
absl::StatusOr<std::unique_ptr<DeviceGraph>> MakeCudaGraph(c10::Device device);

}  // namespace fsdp

#endif  // BASE_CUDA_GRAPH_H_
