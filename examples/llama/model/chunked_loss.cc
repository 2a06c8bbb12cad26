#include "examples/llama/model/chunked_loss.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace llama {
namespace {

using fsdp::StatusError;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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
    const at::Tensor counts = targets.ne(kIgnoredTarget).unsqueeze(1);
    // Ignored rows may have any target.
    const at::Tensor classes = targets.unsqueeze(1).masked_fill(~counts, 0);
    const int64_t rows = hidden.size(0);
    for (int64_t begin = 0; begin < rows; begin += chunk_rows) {
      const int64_t end = std::min(begin + chunk_rows, rows);
      const at::Tensor x = hidden.slice(0, begin, end);
      const at::Tensor chosen = classes.slice(0, begin, end);
      const at::Tensor ignored = ~counts.slice(0, begin, end);
      // Logits, their exponentials and their gradient share one memory.
      at::Tensor logits = at::mm(x, weight.t()).to(exact);
      logits.sub_(logits.amax(1, /*keepdim=*/true));
      const at::Tensor of_targets = logits.gather(1, chosen);
      const at::Tensor sums = logits.exp_().sum(1, /*keepdim=*/true);
      loss += (sums.log() - of_targets).masked_fill(ignored, 0).sum();
      if (!hidden_gradient && !weight_gradient) continue;
      logits.div_(sums);
      logits.scatter_add_(1, chosen, at::zeros_like(of_targets).sub_(1));
      logits.masked_fill_(ignored, 0);
      const at::Tensor gradient = logits.to(hidden.scalar_type());
      if (hidden_gradient) {
        at::Tensor out = of_hidden.slice(0, begin, end);
        at::mm_out(out, gradient, weight);
      }
      if (weight_gradient && exact == hidden.scalar_type()) {
        of_weight.addmm_(gradient.t(), x);
      } else if (weight_gradient) {
        of_weight += at::mm(gradient.t(), x);
      }
    }
    // Each gradient has the dtype of what it is a gradient of.
    const at::Tensor number = counts.sum();
    const at::Tensor divisor = number.clamp_min(1);
    if (hidden_gradient) of_hidden.div_(divisor);
    if (weight_gradient) {
      of_weight = of_weight.div_(divisor).to(weight.scalar_type());
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

void CheckArguments(const at::Tensor& hidden, const at::Tensor& weight,
                    const at::Tensor& targets, int64_t chunk_rows) {
  const bool fits = hidden.dim() == 2 && weight.dim() == 2 &&
                    targets.dim() == 1 && hidden.size(1) == weight.size(1) &&
                    hidden.size(0) == targets.size(0) && chunk_rows > 0;
  if (fits && hidden.scalar_type() == weight.scalar_type() &&
      hidden.is_floating_point() && targets.scalar_type() == at::kLong) {
    return;
  }
  const auto shown = [](const at::Tensor& tensor) {
    return absl::StrCat(c10::toString(tensor.scalar_type()), " [",
                        absl::StrJoin(tensor.sizes(), ", "), "]");
  };
  throw StatusError(absl::InvalidArgumentError(absl::StrCat(
      "chunked cross entropy of hidden ", shown(hidden), ", weight ",
      shown(weight), ", targets ", shown(targets), ", ", chunk_rows,
      " rows at a time: wants [tokens, dim] and [vocab, dim] of one "
      "floating-point dtype, int64 [tokens], at least one row")));
}

}  // namespace

at::Tensor ChunkedCrossEntropy(const at::Tensor& hidden,
                               const at::Tensor& weight,
                               const at::Tensor& targets, int64_t chunk_rows) {
  CheckArguments(hidden, weight, targets, chunk_rows);
  const bool records = c10::GradMode::is_enabled();
  return CrossEntropy::apply(hidden, weight, targets, chunk_rows,
                             records && hidden.requires_grad(),
                             records && weight.requires_grad());
}

}  // namespace llama
