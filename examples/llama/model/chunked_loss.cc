#include "examples/llama/model/chunked_loss.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "absl/status/status.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "device_ops/fused_layers.h"

namespace llama {
namespace {

using fsdp::StatusError;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Adds a * b to `sum`, whose dtype is theirs or float32.
void AddProduct(const at::Tensor& a, const at::Tensor& b, at::Tensor& sum) {
  if (sum.scalar_type() == a.scalar_type()) {
    sum.addmm_(a, b);
  } else if (sum.is_cuda()) {
    // Other devices have no product of halves that is not rounded to them.
    at::addmm_out(sum, sum, a, b, /*out_dtype=*/at::kFloat);
  } else {
    sum += at::mm(a, b);
  }
}

// The gradients are sums over chunks, which at the end are divided by the
// number of targets that count.
class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& hidden,
                            const at::Tensor& weight, const at::Tensor& targets,
                            int64_t chunk_rows, bool hidden_gradient,
                            bool weight_gradient) {
    const c10::ScalarType exact = at::toOpMathType(hidden.scalar_type());
    const at::TensorOptions options = hidden.options();
    at::Tensor loss = at::zeros({}, options.dtype(at::kDouble));
    at::Tensor of_hidden, of_weight;  // gradients; undefined: not wanted
    if (hidden_gradient) of_hidden = at::empty_like(hidden);
    if (weight_gradient) {
      of_weight = at::zeros(weight.sizes(), options.dtype(exact));
    }
    const bool wants_gradient = hidden_gradient || weight_gradient;
    const int64_t rows = hidden.size(0);
    for (int64_t begin = 0; begin < rows; begin += chunk_rows) {
      const int64_t end = std::min(begin + chunk_rows, rows);
      const at::Tensor x = hidden.slice(0, begin, end);
      const at::Tensor logits = at::mm(x, weight.t());
      loss += fsdp::device_ops::CrossEntropyOfRows(
                  logits, targets.slice(0, begin, end), kIgnoredTarget,
                  wants_gradient)
                  .sum();
      // The logits have become their gradient.
      if (hidden_gradient) {
        at::Tensor out = of_hidden.slice(0, begin, end);
        at::mm_out(out, logits, weight);
      }
      if (weight_gradient) AddProduct(logits.t(), x, of_weight);
    }
    const at::Tensor number = targets.ne(kIgnoredTarget).sum();
    const at::Tensor divisor = number.clamp_min(1);
    if (hidden_gradient) of_hidden.div_(divisor);
    if (weight_gradient) {
      // Each gradient has the dtype of what it is a gradient of.
      const at::Tensor sum = of_weight;
      if (exact != weight.scalar_type()) of_weight = at::empty_like(weight);
      at::div_out(of_weight, sum, divisor);
    }
    context->save_for_backward({of_hidden, of_weight});
    return (loss / number).to(exact);
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    if (c10::GradMode::is_enabled()) {
      throw StatusError(absl::UnimplementedError(
          "ChunkedCrossEntropy has no gradient of its gradient: call backward "
          "without create_graph, or use at::cross_entropy_loss"));
    }
    variable_list results(6);
    const variable_list saved = context->get_saved_variables();
    for (int i = 0; i < 2; ++i) {
      if (saved[i].defined()) results[i] = saved[i] * gradients[0];
    }
    return results;
  }
};

}  // namespace

at::Tensor ChunkedCrossEntropy(const at::Tensor& hidden,
                               const at::Tensor& weight,
                               const at::Tensor& targets, int64_t chunk_rows) {
  FSDP_CHECK(targets.size(0) == hidden.size(0) && chunk_rows > 0);
  const bool records = c10::GradMode::is_enabled();
  return CrossEntropy::apply(hidden, weight, targets, chunk_rows,
                             records && hidden.requires_grad(),
                             records && weight.requires_grad());
}

}  // namespace llama
