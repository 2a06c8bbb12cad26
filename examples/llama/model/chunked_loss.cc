#include "examples/llama/model/chunked_loss.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_error.h"

namespace llama {
namespace {

using fsdp::StatusError;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Sums the loss and its gradients over chunks. At the end the sums are divided
// by the number of targets that count.
class Sums {
 public:
  Sums(const at::Tensor& hidden, const at::Tensor& weight, bool hidden_gradient,
       bool weight_gradient)
      : hidden_(hidden), weight_(weight) {
    const auto options = hidden.options();
    loss_ = at::zeros({}, options.dtype(at::kDouble));
    if (hidden_gradient) hidden_gradient_ = at::empty_like(hidden);
    if (weight_gradient) {
      weight_gradient_ = at::zeros(weight.sizes(), options.dtype(Exact()));
    }
  }

  // Adds rows `begin` to `end`. `counts` says which of them are not ignored,
  // `targets` what they are to be; ignored rows may have any target. Both are
  // [rows, 1].
  void Add(int64_t begin, int64_t end, const at::Tensor& targets,
           const at::Tensor& counts) {
    const at::Tensor hidden = hidden_.slice(0, begin, end);
    // Logits, their exponentials and their gradient share one memory.
    at::Tensor logits = at::mm(hidden, weight_.t()).to(Exact());
    logits.sub_(logits.amax(1, /*keepdim=*/true));
    const at::Tensor of_targets = logits.gather(1, targets);
    const at::Tensor sums = logits.exp_().sum(1, /*keepdim=*/true);
    loss_ += (sums.log() - of_targets).masked_fill(~counts, 0).sum();
    if (!hidden_gradient_.defined() && !weight_gradient_.defined()) return;
    logits.div_(sums);
    logits.scatter_add_(1, targets, at::zeros_like(of_targets).sub_(1));
    logits.masked_fill_(~counts, 0);
    AddGradients(begin, end, hidden, logits.to(hidden.scalar_type()));
  }

  at::Tensor Loss(const at::Tensor& number) const {
    return (loss_ / number).to(Exact());
  }
  // The gradients, undefined if they are not wanted, are divided by `number`,
  // which is not 0. Each has the dtype of what it is a gradient of.
  at::Tensor HiddenGradient(const at::Tensor& number) {
    if (!hidden_gradient_.defined()) return {};
    return hidden_gradient_.div_(number);
  }
  at::Tensor WeightGradient(const at::Tensor& number) {
    if (!weight_gradient_.defined()) return {};
    return weight_gradient_.div_(number).to(weight_.scalar_type());
  }

 private:
  c10::ScalarType Exact() const {
    return at::toOpMathType(hidden_.scalar_type());
  }

  void AddGradients(int64_t begin, int64_t end, const at::Tensor& hidden,
                    const at::Tensor& logits) {
    if (hidden_gradient_.defined()) {
      at::Tensor rows = hidden_gradient_.slice(0, begin, end);
      at::mm_out(rows, logits, weight_);
    }
    if (!weight_gradient_.defined()) return;
    if (weight_gradient_.scalar_type() == hidden.scalar_type()) {
      weight_gradient_.addmm_(logits.t(), hidden);
    } else {
      weight_gradient_ += at::mm(logits.t(), hidden);
    }
  }

  const at::Tensor& hidden_;
  const at::Tensor& weight_;
  at::Tensor loss_;
  at::Tensor hidden_gradient_;
  at::Tensor weight_gradient_;
};

class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& hidden,
                            const at::Tensor& weight, const at::Tensor& targets,
                            int64_t chunk_rows, bool hidden_gradient,
                            bool weight_gradient) {
    Sums sums(hidden, weight, hidden_gradient, weight_gradient);
    const at::Tensor counts = targets.ne(kIgnoredTarget).unsqueeze(1);
    const at::Tensor classes = targets.unsqueeze(1).masked_fill(~counts, 0);
    const int64_t rows = hidden.size(0);
    for (int64_t begin = 0; begin < rows; begin += chunk_rows) {
      const int64_t end = std::min(begin + chunk_rows, rows);
      sums.Add(begin, end, classes.slice(0, begin, end),
               counts.slice(0, begin, end));
    }
    const at::Tensor number = counts.sum();
    const at::Tensor divisor = number.clamp_min(1);
    context->save_for_backward(
        {sums.HiddenGradient(divisor), sums.WeightGradient(divisor)});
    return sums.Loss(number);
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
