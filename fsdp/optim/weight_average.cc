#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/optim/training_step.h"

namespace fsdp {
namespace {

at::Tensor NewAverage(const at::Tensor& parameter) {
  return at::empty_like(parameter.detach(),
                        parameter.options().requires_grad(false).dtype(
                            at::toOpMathType(parameter.scalar_type())));
}

absl::Status InModelError() {
  return absl::FailedPreconditionError(
      "WeightAverage: the average is in the model until InModel() ends");
}

}  // namespace

WeightAverage::WeightAverage(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.requires_grad()) continue;
    indices_[parameter.unsafeGetTensorImpl()] = parameters_.size();
    parameters_.push_back(parameter);
  }
}

absl::Status WeightAverage::Update(double decay) {
  if (!(decay >= 0 && decay <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("WeightAverage: a decay of ", decay,
                     " is not between 0 and 1; 0.999 is usual"));
  }
  if (is_in_model_) return InModelError();
  return TorchToStatus("averaging the weights", [&] {
    const c10::NoGradGuard no_grad;
    std::vector<at::Tensor> averages;  // that one operator can take
    std::vector<at::Tensor> parameters;
    const bool is_first = averages_.empty();
    std::vector<at::Tensor> all = averages_;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor parameter = parameters_[i].detach();
      if (is_first) all.push_back(NewAverage(parameter));
      at::Tensor& average = all[i];
      if (!is_first && !RestsElsewhere(parameter) &&
          parameter.scalar_type() == average.scalar_type()) {
        averages.push_back(average);
        parameters.push_back(parameter);
        continue;
      }
      const Resident resident =
          ValueOrThrow(Resident::Of(parameter, Use::kRead));
      if (is_first) {
        average.copy_(parameter);
      } else {
        average.lerp_(parameter.to(average.scalar_type()), 1 - decay);
      }
    }
    if (!averages.empty()) at::_foreach_lerp_(averages, parameters, 1 - decay);
    // Reading a parameter may fail, so this waits until all of them are read.
    averages_ = std::move(all);
  });
}

absl::Status WeightAverage::InModel(FallibleRef fn) {
  if (is_in_model_) return InModelError();
  FSDP_RETURN_IF_ERROR(Exchange());
  is_in_model_ = true;
  const absl::Status status = TorchToStatus("using averaged weights", fn);
  const absl::Status back = Exchange();
  is_in_model_ = false;
  return status.ok() ? back : status;
}

at::Tensor WeightAverage::Of(const at::Tensor& parameter) const {
  const auto found = indices_.find(parameter.unsafeGetTensorImpl());
  if (found == indices_.end()) return at::Tensor();
  return averages_.empty() ? parameter.detach() : averages_[found->second];
}

absl::StatusOr<at::Tensor> WeightAverage::ToFill(const at::Tensor& parameter) {
  if (averages_.empty()) FSDP_RETURN_IF_ERROR(Update(/*decay=*/0));
  return Of(parameter);
}

// Swaps weights and averages; a second call swaps them back.
absl::Status WeightAverage::Exchange() {
  return TorchToStatus("exchanging weights and their average", [&] {
    const c10::NoGradGuard no_grad;
    const std::vector<at::Tensor> weights = std::exchange(weights_, {});
    size_t next = 0;
    for (size_t i = 0; i < averages_.size(); ++i) {
      const at::Tensor parameter = parameters_[i].detach();
      const Resident resident =
          ValueOrThrow(Resident::Of(parameter, Use::kUpdate));
      at::Tensor& average = averages_[i];
      if (parameter.scalar_type() == average.scalar_type()) {
        const at::Tensor held = parameter.clone();
        parameter.copy_(average);
        average = held;
      } else if (is_in_model_) {
        parameter.copy_(weights[next++]);
      } else {
        weights_.push_back(parameter.clone());
        parameter.copy_(average);
      }
    }
  });
}

}  // namespace fsdp
