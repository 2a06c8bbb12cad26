#include "examples/llama/model/rms_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rsqrt.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace llama {

RmsNormImpl::RmsNormImpl(int64_t dim, double eps)
    : weight(register_parameter("weight", at::ones({dim}))), eps_(eps) {}

at::Tensor RmsNormImpl::forward(const at::Tensor& x) {
  const at::Tensor exact = x.to(at::kFloat);
  const at::Tensor mean_square = exact.square().mean(-1, /*keepdim=*/true);
  return weight * (exact * (mean_square + eps_).rsqrt()).to(x.scalar_type());
}

}  // namespace llama
