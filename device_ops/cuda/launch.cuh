// How kernels are launched: by the runtime's function instead of <<<>>>, which
// only nvcc knows, so that tests can compile and run kernels on the host.
#ifndef DEVICE_OPS_CUDA_LAUNCH_CUH_
#define DEVICE_OPS_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <utility>

namespace fsdp::device_ops::cuda {

// How many blocks of `threads` threads the current device runs at once, where
// nothing else limits them.
inline cudaError_t ResidentBlocks(unsigned threads, unsigned* blocks) {
  constexpr unsigned kThreadsPerMultiprocessor = 2048;
  int device = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors,
                                   cudaDevAttrMultiProcessorCount, device);
  }
  *blocks = static_cast<unsigned>(multiprocessors) *
            (kThreadsPerMultiprocessor / threads);
  return error;
}

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
