// Converts tensors to the kernels' arguments.
#ifndef DEVICE_OPS_CUDA_ARGUMENTS_H_
#define DEVICE_OPS_CUDA_ARGUMENTS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <vector>

#include "device_ops/cuda/element.h"

namespace fsdp::device_ops::cuda {

// Throws c10::Error for dtypes that the kernels do not know.
Element ElementOf(c10::ScalarType dtype);

// Converts the arguments of libtorch_fsdp::pack_.
std::vector<PackItem> PackItems(at::TensorList sources, c10::IntArrayRef pieces,
                                c10::IntArrayRef zeros, c10::IntArrayRef ones);

// Converts the arguments of libtorch_fsdp::rotate_halves_.
RotatedHeads RotationOf(const at::Tensor& out, const at::Tensor& x,
                        const at::Tensor& cos, const at::Tensor& sin,
                        bool inverse);

}  // namespace fsdp::device_ops::cuda

#endif  // DEVICE_OPS_CUDA_ARGUMENTS_H_
