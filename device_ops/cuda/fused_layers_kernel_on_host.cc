#include "device_ops/cuda/fused_layers_kernel.cu"
