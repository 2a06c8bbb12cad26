// Compares the operators of fused_layers.h, and their gradients, with
// LibTorch's operators in float64.
#ifndef DEVICE_OPS_TESTING_FUSED_LAYER_CASES_H_
#define DEVICE_OPS_TESTING_FUSED_LAYER_CASES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace fsdp::device_ops::testing {

// Return what the operators of these names are to compute, by operators of
// LibTorch that autograd records.
at::Tensor PlainRotation(const at::Tensor& x, const at::Tensor& cos,
                         const at::Tensor& sin);
at::Tensor PlainSwiGlu(const at::Tensor& gate, const at::Tensor& up);

// Expect that results on `device` are those of float64, rounded once to
// `dtype`, but for errors of 1e-6 where that is not float64 itself. Sizes, the
// places of tensors in memory and their strides vary.
void ExpectRotationsRoundOnce(c10::Device device, c10::ScalarType dtype);
void ExpectSwiGlusRoundOnce(c10::Device device, c10::ScalarType dtype);
void ExpectCrossEntropiesRoundOnce(c10::Device device, c10::ScalarType dtype);

}  // namespace fsdp::device_ops::testing

#endif  // DEVICE_OPS_TESTING_FUSED_LAYER_CASES_H_
