// The smallest kernel that shows whether nvcc, the runtime and a GPU fit.
#ifndef THIRD_PARTY_CUDA_SMOKE_H_
#define THIRD_PARTY_CUDA_SMOKE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

// out[i] = i for 0 <= i < n, in device memory, on `stream`.
cudaError_t CountUp(int64_t* out, int64_t n, cudaStream_t stream);

#endif  // THIRD_PARTY_CUDA_SMOKE_H_
