// Launches the kernels behind RotateHalves(), SwiGlu() and
// CrossEntropyOfRows().
#ifndef DEVICE_OPS_CUDA_FUSED_LAYERS_KERNEL_H_
#define DEVICE_OPS_CUDA_FUSED_LAYERS_KERNEL_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device_ops/cuda/element.h"

namespace fsdp::device_ops::cuda {

// Launch on `stream`, without allocating or waiting. `type` is that of all
// numbers; arrays have `numel` of them, or `rows` x `classes`, one after the
// other.
cudaError_t LaunchRotate(const RotatedHeads& heads, Element type,
                         cudaStream_t stream);
cudaError_t LaunchSwiGlu(int64_t numel, Element type, const void* gate,
                         const void* up, void* out, cudaStream_t stream);
cudaError_t LaunchSwiGluBackward(int64_t numel, Element type,
                                 const void* gradient, const void* gate,
                                 const void* up, void* of_gate, void* of_up,
                                 cudaStream_t stream);
// `rows` < 2^31. `losses` are double for Element::kDouble, otherwise float.
cudaError_t LaunchCrossEntropy(int64_t rows, int64_t classes, Element type,
                               void* logits, const int64_t* targets,
                               int64_t ignored, bool gradient, void* losses,
                               cudaStream_t stream);

}  // namespace fsdp::device_ops::cuda

#endif  // DEVICE_OPS_CUDA_FUSED_LAYERS_KERNEL_H_
