// Has the toolkit's name: the part of the CUDA runtime that our launches use.
#ifndef DEVICE_OPS_TESTING_HOST_CUDA_CUDA_RUNTIME_API_H_
#define DEVICE_OPS_TESTING_HOST_CUDA_CUDA_RUNTIME_API_H_

#include <cstddef>

// NOLINTBEGIN: the names are CUDA's.
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719,
};

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };

using cudaStream_t = struct CUstream_st*;

struct uint3 {
  unsigned x = 0;
  unsigned y = 0;
  unsigned z = 0;
};

struct dim3 {
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1)
      : x(x), y(y), z(z) {}

  unsigned x;
  unsigned y;
  unsigned z;
};

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

// Says two of every attribute, multiprocessors above all: a grid that fits the
// device is small, and its blocks have to come again for the rest.
inline cudaError_t cudaDeviceGetAttribute(int* value,
                                          cudaDeviceAttr /*attribute*/,
                                          int /*device*/) {
  *value = 2;
  return cudaSuccess;
}
// NOLINTEND

#endif  // DEVICE_OPS_TESTING_HOST_CUDA_CUDA_RUNTIME_API_H_
