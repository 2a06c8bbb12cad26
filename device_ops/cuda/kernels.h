// Launches the kernels on a stream, without allocating or waiting, so that CUDA
// graphs can hold them.
#ifndef DEVICE_OPS_CUDA_KERNELS_H_
#define DEVICE_OPS_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device_ops/cuda/element.h"
#include "device_ops/row_layout.h"

namespace fsdp::device_ops::cuda {

// The most ranges of one launch; they are its arguments, 32 KB at most.
constexpr int kMaxPackItems = 1024;

// Launches the kernel behind Pack(), which writes all items, once for each
// kMaxPackItems.
cudaError_t LaunchPack(const PackItem* items, int64_t count, Element out_type,
                       void* out, double scale, bool accumulate,
                       cudaStream_t stream);

// Launch the kernels behind Quantize() and Dequantize().
cudaError_t LaunchQuantize(const QuantizedRows& rows, Element in_type,
                           const void* in, int8_t* values, float* scales,
                           cudaStream_t stream);
cudaError_t LaunchDequantize(const DequantizedRows& rows, Element out_type,
                             void* out, const int8_t* values,
                             const float* scales, double factor,
                             bool accumulate, cudaStream_t stream);

// Launch the kernels behind RotateHalves(), SwiGlu() and CrossEntropyOfRows().
// `type` is that of all numbers; arrays have `numel` of them, or `rows` x
// `classes`, one after the other.
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

#endif  // DEVICE_OPS_CUDA_KERNELS_H_
