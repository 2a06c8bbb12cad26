#include "device_ops/cuda/block_quantization_kernel.cu"
