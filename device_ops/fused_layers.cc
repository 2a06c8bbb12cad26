#include "device_ops/fused_layers.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>
#include <vector>

namespace fsdp::device_ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Returns the operator whose type is that of a function.
template <typename Function>
auto Find(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Function>();
}

// Devices without kernels of their own run these.

void RotateHalvesByTorch(const at::Tensor& out, const at::Tensor& x,
                         const at::Tensor& cos, const at::Tensor& sin,
                         bool inverse) {
  at::Tensor result = out;
  at::mul_out(result, x, cos);
  if (inverse) {
    const std::vector<at::Tensor> halves = (x * sin).chunk(2, -1);
    result.add_(at::cat({halves[1], -halves[0]}, -1));
  } else {
    const std::vector<at::Tensor> halves = x.chunk(2, -1);
    result.add_(at::cat({-halves[1], halves[0]}, -1) * sin);
  }
}

void SwiGluByTorch(const at::Tensor& out, const at::Tensor& gate,
                   const at::Tensor& up) {
  at::Tensor result = out;
  at::silu_out(result, gate).mul_(up);
}

void SwiGluBackwardByTorch(const at::Tensor& of_gate, const at::Tensor& of_up,
                           const at::Tensor& gradient, const at::Tensor& gate,
                           const at::Tensor& up) {
  at::Tensor result = of_up;
  at::silu_out(result, gate).mul_(gradient);
  result = of_gate;
  at::mul_out(result, gradient, up);
  at::silu_backward_out(result, result, gate);
}

void CrossEntropyByTorch(const at::Tensor& losses, const at::Tensor& logits,
                         const at::Tensor& targets, int64_t ignored,
                         bool gradient) {
  // Logits, their exponentials and their gradient share one memory.
  const at::Tensor exact = logits.to(losses.scalar_type());
  const at::Tensor skipped = targets.eq(ignored).unsqueeze(1);
  // Ignored rows may have any target.
  const at::Tensor chosen = targets.unsqueeze(1).masked_fill(skipped, 0);
  exact.sub_(exact.amax(1, /*keepdim=*/true));
  const at::Tensor of_targets = exact.gather(1, chosen);
  const at::Tensor sums = exact.exp_().sum(1, /*keepdim=*/true);
  losses.copy_((sums.log() - of_targets).masked_fill_(skipped, 0).squeeze(1));
  if (!gradient) return;
  exact.div_(sums);
  exact.scatter_add_(1, chosen, at::zeros_like(of_targets).sub_(1));
  exact.masked_fill_(skipped, 0);
  if (!exact.is_same(logits)) logits.copy_(exact);
}

TORCH_LIBRARY_FRAGMENT(libtorch_fsdp, m) {
  m.def(
      "rotate_halves_(Tensor(a!) out, Tensor x, Tensor cos, Tensor sin, "
      "bool inverse) -> ()");
  m.def("swiglu_(Tensor(a!) out, Tensor gate, Tensor up) -> ()");
  m.def(
      "swiglu_backward_(Tensor(a!) of_gate, Tensor(b!) of_up, "
      "Tensor gradient, Tensor gate, Tensor up) -> ()");
  m.def(
      "cross_entropy_(Tensor(a!) losses, Tensor(b!) logits, Tensor targets, "
      "int ignored, bool gradient) -> ()");
}

TORCH_LIBRARY_IMPL(libtorch_fsdp, CompositeExplicitAutograd, m) {
  m.impl("rotate_halves_", &RotateHalvesByTorch);
  m.impl("swiglu_", &SwiGluByTorch);
  m.impl("swiglu_backward_", &SwiGluBackwardByTorch);
  m.impl("cross_entropy_", &CrossEntropyByTorch);
}

// Its gradient is turned by the transposed matrix.
class Rotation : public torch::autograd::Function<Rotation> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& cos, const at::Tensor& sin,
                            bool inverse) {
    static const auto op =
        Find<decltype(RotateHalvesByTorch)>("libtorch_fsdp::rotate_halves_");
    context->saved_data["inverse"] = inverse;
    context->save_for_backward({cos, sin});
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor heads = x.stride(-1) == 1 ? x : x.contiguous();
    at::Tensor out = at::empty_like(heads);
    if (out.stride(-1) != 1) out = at::empty(heads.sizes(), heads.options());
    op.call(out, heads, cos, sin, inverse);
    return out;
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    const variable_list tables = context->get_saved_variables();
    variable_list results(4);
    results[0] = Rotation::apply(gradients[0], tables[0], tables[1],
                                 !context->saved_data["inverse"].toBool());
    return results;
  }
};

class GatedUnit : public torch::autograd::Function<GatedUnit> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate,
                            const at::Tensor& up) {
    static const auto op =
        Find<decltype(SwiGluByTorch)>("libtorch_fsdp::swiglu_");
    context->save_for_backward({gate, up});
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor out = at::empty_like(gate);
    op.call(out, gate, up);
    return out;
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    static const auto op = Find<decltype(SwiGluBackwardByTorch)>(
        "libtorch_fsdp::swiglu_backward_");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &gate = saved[0], &up = saved[1];
    const at::Tensor gradient = gradients[0].contiguous();
    if (c10::GradMode::is_enabled()) {  // for gradients of gradients
      const at::Tensor sigmoid = gate.sigmoid();
      return {gradient * up * sigmoid * (1 + gate * (1 - sigmoid)),
              gradient * gate * sigmoid};
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor of_gate = at::empty_like(gate);
    at::Tensor of_up = at::empty_like(up);
    op.call(of_gate, of_up, gradient, gate, up);
    return {of_gate, of_up};
  }
};

}  // namespace

at::Tensor RotateHalves(const at::Tensor& x, const at::Tensor& cos,
                        const at::Tensor& sin) {
  TORCH_CHECK(x.dim() == 4 && x.size(3) > 0 && x.size(3) % 2 == 0 &&
                  cos.dim() == 2 && cos.size(0) == x.size(2) &&
                  cos.size(1) == x.size(3) && sin.sizes() == cos.sizes() &&
                  sin.scalar_type() == cos.scalar_type() &&
                  cos.device() == x.device() && sin.device() == x.device(),
              "cannot turn ", x.sizes(), " on ", x.device(), " by tables of ",
              cos.sizes(), " on ", cos.device(), " and ", sin.sizes(), " on ",
              sin.device());
  const c10::ScalarType dtype = at::result_type(x, cos);
  return Rotation::apply(x.to(dtype), cos.to(dtype).contiguous(),
                         sin.to(dtype).contiguous(), /*inverse=*/false);
}

at::Tensor SwiGlu(const at::Tensor& gate, const at::Tensor& up) {
  TORCH_CHECK(gate.sizes() == up.sizes() &&
                  gate.scalar_type() == up.scalar_type() &&
                  gate.device() == up.device(),
              "SwiGLU of ", gate.toString(), " ", gate.sizes(), " and ",
              up.toString(), " ", up.sizes());
  return GatedUnit::apply(gate.contiguous(), up.contiguous());
}

at::Tensor CrossEntropyOfRows(const at::Tensor& logits,
                              const at::Tensor& targets, int64_t ignored,
                              bool gradient) {
  static const auto op =
      Find<decltype(CrossEntropyByTorch)>("libtorch_fsdp::cross_entropy_");
  TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous() &&
                  targets.dim() == 1 && targets.size(0) == logits.size(0) &&
                  targets.scalar_type() == at::kLong &&
                  targets.device() == logits.device() &&
                  logits.size(0) <= std::numeric_limits<int32_t>::max(),
              "cross entropy of ", logits.toString(), " ", logits.sizes(),
              " against ", targets.toString(), " ", targets.sizes());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor losses =
      at::empty({logits.size(0)},
                logits.options().dtype(at::toOpMathType(logits.scalar_type())));
  op.call(losses, logits, targets.contiguous(), ignored, gradient);
  return losses;
}

}  // namespace fsdp::device_ops
