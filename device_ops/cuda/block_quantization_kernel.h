// Launches the kernels behind Quantize() and Dequantize().
#ifndef DEVICE_OPS_CUDA_BLOCK_QUANTIZATION_KERNEL_H_
#define DEVICE_OPS_CUDA_BLOCK_QUANTIZATION_KERNEL_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device_ops/cuda/element.h"
#include "device_ops/row_layout.h"

namespace fsdp::device_ops::cuda {

// Launch on `stream`, without allocating or waiting.
cudaError_t LaunchQuantize(const QuantizedRows& rows, Element in_type,
                           const void* in, int8_t* values, float* scales,
                           cudaStream_t stream);
cudaError_t LaunchDequantize(const DequantizedRows& rows, Element out_type,
                             void* out, const int8_t* values,
                             const float* scales, double factor,
                             bool accumulate, cudaStream_t stream);

}  // namespace fsdp::device_ops::cuda

#endif  // DEVICE_OPS_CUDA_BLOCK_QUANTIZATION_KERNEL_H_
