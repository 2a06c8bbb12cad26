#include "adapters/linear.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <cmath>
#include <cstdint>

#include "adapters/int8_rows.h"
#include "base/check.h"

namespace fsdp::adapters {

FactorImpl::FactorImpl(int64_t in, int64_t out,
                       const at::TensorOptions& options)
    : torch::nn::Module("Factor"),
      weight(register_parameter("weight", at::empty({out, in}, options))) {}

at::Tensor LinearImpl::forward(const at::Tensor& x) {
  // What Python computes: LibTorch's Linear rounds before it adds the bias.
  const at::Tensor y = int8_rows_.has_value()
                           ? Int8Linear(*int8_rows_, x, weight, bias)
                           : at::linear(x, weight, bias);
  if (!has_low_rank()) return y;
  at::Tensor in = x.to(a_->weight.scalar_type());
  if (dropout_ > 0) in = at::dropout(in, dropout_, is_training());
  const at::Tensor added =
      at::linear(at::linear(in, a_->weight), b_->weight) * scale_;
  return (y + added).to(y.scalar_type());
}

void LinearImpl::AddLowRank(const LowRankOptions& options) {
  FSDP_CHECK(!has_low_rank() && options.rank >= 1 && options.dropout >= 0 &&
             options.dropout < 1);
  const auto in = static_cast<int64_t>(this->options.in_features());
  const auto out = static_cast<int64_t>(this->options.out_features());
  const at::TensorOptions like =
      weight.options().dtype(options.dtype).requires_grad(false);
  a_ = register_module("lora_A", Factor(in, options.rank, like));
  b_ = register_module("lora_B", Factor(options.rank, out, like));
  scale_ = options.scale;
  dropout_ = options.dropout;
  const c10::NoGradGuard no_grad;
  const double bound = 1 / std::sqrt(static_cast<double>(in));
  a_->weight.uniform_(-bound, bound);
  b_->weight.zero_();
}

void LinearImpl::Merge() {
  FSDP_CHECK(has_low_rank());
  const c10::NoGradGuard no_grad;
  if (int8_rows_.has_value()) {
    weight.set_data(WeightIn(merged_dtype_));
    int8_rows_.reset();
  }
  AddProduct(weight, a_->weight, b_->weight, scale_);
  b_->weight.zero_();
}

void LinearImpl::Quantize(int64_t block) {
  FSDP_CHECK(!int8_rows_.has_value());
  const Int8Rows layout = Int8Rows::Of(weight.size(1), block);
  merged_dtype_ = weight.scalar_type();
  weight.set_requires_grad(false);
  weight.set_data(Pack(layout, weight.detach()));
  int8_rows_ = layout;
}

at::Tensor LinearImpl::WeightIn(c10::ScalarType dtype) const {
  return int8_rows_.has_value() ? Unpack(*int8_rows_, weight, dtype)
                                : weight.to(dtype);
}

void AddProduct(const at::Tensor& weight, const at::Tensor& a,
                const at::Tensor& b, double scale) {
  weight.add_(at::matmul(b, a) * scale);
}

}  // namespace fsdp::adapters
