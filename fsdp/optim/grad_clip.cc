#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "fsdp/optim/shard_gradients.h"
#include "fsdp/optim/training_step.h"
#include "ranges/tensor_range.h"

namespace fsdp {
namespace {

// Returns this rank's part of the sum of |g|^p, or of the maximum, in float64,
// which holds powers that float32 does not.
at::Tensor LocalTotal(const std::vector<GradientGroup>& groups, double p,
                      at::Device device) {
  at::Tensor total =
      at::zeros({1}, at::TensorOptions(at::kDouble).device(device));
  for (const GradientGroup& group : groups) {
    std::vector<at::Tensor> each;
    ThrowIfError(ForEachInMemory(
        group.each, Use::kRead, [&](const std::vector<at::Tensor>& gradients) {
          for (at::Tensor& norm :
               at::_foreach_norm(gradients, p, group.math_dtype())) {
            each.push_back(std::move(norm));
          }
        }));
    const at::Tensor norms = at::stack(each).to(device, at::kDouble);
    if (std::isinf(p)) {
      total = at::maximum(total, norms.max());
    } else {
      total += norms.pow(p).sum() / group.replicas;
    }
  }
  return total;
}

absl::Status CheckFinite(comm::Communicator& world, const at::Tensor& norm,
                         absl::Span<const TensorRange> shards,
                         const std::string& what) {
  const double value = norm.item<double>();
  if (std::isfinite(value)) return absl::OkStatus();
  FSDP_ASSIGN_OR_RETURN(const NotFinite first,
                        FindNotFinite(&world, shards, what));
  return comm::AsAgreed(absl::FailedPreconditionError(
      absl::StrCat(what, ": the norm is ", value, ": ",
                   first.gradient.empty()
                       ? "gradients are finite, but too large for it"
                       : absl::StrCat("the gradient of ", first.gradient,
                                      " is the first one that is not finite"),
                   ". No gradient was changed: skip this step, or clip without "
                   "error_if_nonfinite")));
}

void Scale(const std::vector<GradientGroup>& groups, const at::Tensor& norm,
           double max_norm) {
  const at::Tensor coefficient =
      (max_norm / (norm + 1e-6)).clamp_max(1.0).reshape({});
  for (const GradientGroup& group : groups) {
    const at::Tensor factor = coefficient.to(group.device, group.math_dtype());
    ThrowIfError(ForEachInMemory(group.gradients, Use::kUpdate,
                                 [&](const std::vector<at::Tensor>& gradients) {
                                   at::_foreach_mul_(gradients, factor);
                                 }));
    CountWrites(group);
  }
}

at::ScalarType ResultDtype(absl::Span<const TensorRange> shards) {
  const bool any_double =
      std::any_of(shards.begin(), shards.end(), [](const TensorRange& named) {
        return named.values.scalar_type() == at::kDouble;
      });
  return any_double ? at::kDouble : at::kFloat;
}

at::Tensor ClipOrThrow(comm::Communicator& world,
                       absl::Span<const TensorRange> shards,
                       const ClipGradNormOptions& options,
                       const std::string& what) {
  c10::NoGradGuard no_grad;
  const double p = options.norm_type;
  const std::vector<GradientGroup> groups = GroupGradients(shards);
  at::Tensor norm;
  ThrowIfError(OrAbort(
      world, what, [&] { norm = LocalTotal(groups, p, DeviceOf(shards)); }));
  ThrowIfError(ReduceNumber(
      world, norm, std::isinf(p) ? comm::ReduceOp::kMax : comm::ReduceOp::kSum,
      what, options.timeout));
  if (!std::isinf(p)) norm = norm.pow(1.0 / p);
  if (options.error_if_nonfinite) {
    ThrowIfError(CheckFinite(world, norm, shards, what));
  }
  if (!std::isinf(options.max_norm)) {
    ThrowIfError(
        OrAbort(world, what, [&] { Scale(groups, norm, options.max_norm); }));
  }
  return norm.to(ResultDtype(shards)).reshape({});
}

}  // namespace

absl::StatusOr<at::Tensor> ClipGradNorm(comm::Communicator& world,
                                        absl::Span<const TensorRange> shards,
                                        const ClipGradNormOptions& options) {
  // As the all-reduce's label, this shows ranks with different options to
  // backends that compare calls.
  const std::string what =
      absl::StrCat("clipping gradients to a ", options.norm_type, "-norm of ",
                   options.max_norm);
  // This form refuses NaN.
  if (!(options.max_norm > 0 && options.norm_type > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": both numbers must be positive"));
  }
  if (options.timeout.has_value() && *options.timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, ": the timeout is ", absl::FormatDuration(*options.timeout),
        "; leave it unset for the communicator's"));
  }
  at::Tensor norm;
  FSDP_RETURN_IF_ERROR(TorchToStatus(
      what, [&] { norm = ClipOrThrow(world, shards, options, what); }));
  return norm;
}

}  // namespace fsdp
