#include "third_party/cuda/smoke.h"

namespace {

__global__ void CountUpKernel(int64_t* out, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = i;
}

}  // namespace

cudaError_t CountUp(int64_t* out, int64_t n, cudaStream_t stream) {
  constexpr int kThreads = 256;
  if (n == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((n + kThreads - 1) / kThreads);
  CountUpKernel<<<blocks, kThreads, 0, stream>>>(out, n);
  return cudaGetLastError();
}
