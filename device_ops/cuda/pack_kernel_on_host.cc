#include "device_ops/cuda/pack_kernel.cu"
