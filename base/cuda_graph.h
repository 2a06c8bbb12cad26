// Captures of device work with CUDA (base/device_streams.h).
#ifndef BASE_CUDA_GRAPH_H_
#define BASE_CUDA_GRAPH_H_

#include <c10/core/Device.h>

#include <memory>

#include "absl/status/statusor.h"
#include "base/device_streams.h"

namespace fsdp {

// Makes a graph that is an at::cuda::CUDAGraph. A capture restricts only its
// own thread; the threads of autograd and NCCL go on. Replays draw new random
// numbers from the default generator. InvalidArgument: `device` is not a GPU.
absl::StatusOr<std::unique_ptr<DeviceGraph>> MakeCudaGraph(c10::Device device);

}  // namespace fsdp

#endif  // BASE_CUDA_GRAPH_H_
