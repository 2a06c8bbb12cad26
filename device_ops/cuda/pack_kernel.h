// Launches the kernel behind Pack().
#ifndef DEVICE_OPS_CUDA_PACK_KERNEL_H_
#define DEVICE_OPS_CUDA_PACK_KERNEL_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device_ops/cuda/element.h"

namespace fsdp::device_ops::cuda {

// The most ranges of one launch; they are its arguments, 32 KB at most.
constexpr int kMaxPackItems = 1024;

// Writes all items on `stream`, with one launch for each kMaxPackItems. Does
// not allocate or wait, so CUDA graphs can hold it.
cudaError_t LaunchPack(const PackItem* items, int64_t count, Element out_type,
                       void* out, double scale, bool accumulate,
                       cudaStream_t stream);

}  // namespace fsdp::device_ops::cuda

#endif  // DEVICE_OPS_CUDA_PACK_KERNEL_H_
