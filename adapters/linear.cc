#include "adapters/linear.h"

#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "device_ops/block_quantization.h"

namespace fsdp::adapters {
namespace {

constexpr int64_t kScaleBytes = sizeof(float);

int64_t ScalesBegin(const Int8Rows& layout) {
  return (layout.numel + kScaleBytes - 1) / kScaleBytes * kScaleBytes;
}

int64_t NumScales(const Int8Rows& layout) {
  return device_ops::NumBlocks(layout.numel, layout.block);
}

at::Tensor ValuesOf(const Int8Rows& layout, const at::Tensor& packed) {
  return packed.view(at::kChar).narrow(1, 0, layout.numel);
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class Function : public torch::autograd::Function<Function> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const std::optional<at::Tensor>& bias,
                            const at::Tensor& weight, const Int8Rows& layout) {
    context->save_for_backward({weight});
    context->saved_data["numel"] = layout.numel;
    context->saved_data["block"] = layout.block;
    return at::linear(x, Unpack(layout, weight, x.scalar_type()), bias);
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    const Int8Rows layout{context->saved_data["numel"].toInt(),
                          context->saved_data["block"].toInt()};
    const at::Tensor& gradient = gradients[0];
    variable_list results(4);
    if (context->needs_input_grad(0)) {
      const at::Tensor weight = context->get_saved_variables()[0];
      results[0] =
          at::matmul(gradient, Unpack(layout, weight, gradient.scalar_type()));
    }
    // Without a bias this asks about the weight, which needs none.
    if (context->needs_input_grad(1)) {
      results[1] = gradient.reshape({-1, gradient.size(-1)}).sum(0);
    }
    return results;
  }
};

}  // namespace

Int8Rows Int8Rows::Of(int64_t numel, int64_t most) {
  const int64_t blocks = device_ops::NumBlocks(numel, most);
  return {numel, device_ops::NumBlocks(numel, blocks)};
}

int64_t Int8Rows::row_bytes() const {
  return ScalesBegin(*this) + NumScales(*this) * kScaleBytes;
}

at::Tensor Pack(const Int8Rows& layout, const at::Tensor& rows) {
  FSDP_CHECK(rows.dim() == 2 && rows.size(1) == layout.numel);
  const c10::NoGradGuard no_grad;
  at::Tensor packed = at::zeros({rows.size(0), layout.row_bytes()},
                                rows.options().dtype(at::kByte));
  // Some formats of files are too narrow for the kernels.
  const at::Tensor wide = rows.itemsize() == 1 ? rows.to(at::kFloat) : rows;
  device_ops::Quantize(wide.contiguous(), layout.block,
                       ValuesOf(layout, packed), ScalesOf(layout, packed));
  return packed;
}

at::Tensor Unpack(const Int8Rows& layout, const at::Tensor& packed,
                  c10::ScalarType dtype) {
  FSDP_CHECK(packed.dim() == 2 && packed.size(1) == layout.row_bytes());
  const c10::NoGradGuard no_grad;
  at::Tensor rows =
      at::empty({packed.size(0), layout.numel}, packed.options().dtype(dtype));
  device_ops::Dequantize(rows, ValuesOf(layout, packed),
                         ScalesOf(layout, packed), layout.block);
  return rows;
}

at::Tensor ScalesOf(const Int8Rows& layout, const at::Tensor& packed) {
  return packed.view(at::kFloat)
      .narrow(1, ScalesBegin(layout) / kScaleBytes, NumScales(layout));
}

at::Tensor Int8Linear(const Int8Rows& layout, const at::Tensor& x,
                      const at::Tensor& weight, const at::Tensor& bias) {
  if (weight.scalar_type() != at::kByte || weight.dim() != 2 ||
      weight.size(1) != layout.row_bytes()) {
    throw StatusError(absl::FailedPreconditionError(absl::StrCat(
        "the weight of an int8 layer is ", c10::toString(weight.scalar_type()),
        " [", absl::StrJoin(weight.sizes(), ", "), "] instead of Byte [..., ",
        layout.row_bytes(),
        "]: convert the module, by to() for example, before QuantizeBase()")));
  }
  return Function::apply(
      x, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt,
      weight, layout);
}

FactorImpl::FactorImpl(int64_t in, int64_t out,
                       const at::TensorOptions& options)
    : torch::nn::Module("Factor"),
      weight(register_parameter("weight", at::empty({out, in}, options))) {}

at::Tensor LinearImpl::forward(const at::Tensor& x) {
  // Python computes this: LibTorch's Linear rounds before it adds the bias.
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
      weight.options().dtype(at::kFloat).requires_grad(false);
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
