// How kernels are launched: by the runtime's function instead of <<<>>>, which
// only nvcc knows, so that tests can compile and run kernels on the host.
#ifndef DEVICE_OPS_CUDA_LAUNCH_CUH_
#define DEVICE_OPS_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <utility>

namespace fsdp::device_ops::cuda {

// `blocks` blocks of `threads` threads, on `stream`.
template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), unsigned blocks,
                   unsigned threads, cudaStream_t stream,
                   Arguments&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel,
                            std::forward<Arguments>(arguments)...);
}

}  // namespace fsdp::device_ops::cuda

#endif  // DEVICE_OPS_CUDA_LAUNCH_CUH_
