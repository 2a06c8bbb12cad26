#include "adapters/int8_linear.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "adapters/int8_rows.h"
#include "base/status_error.h"

namespace fsdp::adapters {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void CheckIsPacked(const Int8Rows& layout, const at::Tensor& weight) {
  if (weight.scalar_type() == at::kByte && weight.dim() == 2 &&
      weight.size(1) == layout.row_bytes()) {
    return;
  }
  throw StatusError(absl::FailedPreconditionError(absl::StrCat(
      "the weight of an int8 layer is ", c10::toString(weight.scalar_type()),
      " [", absl::StrJoin(weight.sizes(), ", "), "] instead of Byte [..., ",
      layout.row_bytes(),
      "]: convert the module, by to() for example, before QuantizeBase()")));
}

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

at::Tensor Int8Linear(const Int8Rows& layout, const at::Tensor& x,
                      const at::Tensor& weight, const at::Tensor& bias) {
  CheckIsPacked(layout, weight);
  return Function::apply(
      x, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt,
      weight, layout);
}

}  // namespace fsdp::adapters
