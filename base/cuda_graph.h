// Captures of device work with CUDA (base/device_streams.h).
#ifndef BASE_CUDA_GRAPH_H_
#define BASE_CUDA_GRAPH_H_

#include <c10/core/Device.h>

#include <memory>

#include "absl/status/statusor.h"
#include "base/device_streams.h"

namespace fsdp {

// Returns a graph that is an at::cuda::CUDAGraph. A capture restricts only the
// thread that makes it to what CUDA allows meanwhile; the threads of autograd
// and NCCL go on beside it. Random numbers of the default generator differ from
// replay to replay, as from step to step. InvalidArgument: `device` is not a
// GPU.
absl::StatusOr<std::unique_ptr<DeviceGraph>> MakeCudaGraph(c10::Device device);

}  // namespace fsdp

#endif  // BASE_CUDA_GRAPH_H_
