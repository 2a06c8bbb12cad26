#include "fsdp/runtime/unit_steps.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/torch_status.h"
#include "flat_param/flat_parameter.h"

namespace fsdp {
namespace {

// The slices of the unit's shards that have a gradient.
void ForEachGradient(const RuntimeUnit& unit,
                     absl::FunctionRef<void(const at::Tensor&)> visit) {
  for (const auto& parameter : unit.flats) {
    for (int i = 0; i < parameter->num_parameters(); ++i) {
      const at::Tensor& slice = parameter->ShardSlice(i);
      if (slice.grad().defined()) visit(slice);
    }
  }
}

}  // namespace

absl::Status UnitSteps::Step(
    int unit, const std::function<absl::Status(int unit)>& step) {
  expected_.erase(unit);
  std::vector<std::pair<at::Tensor, at::Tensor>> hidden;  // slice, gradient
  for (int other : expected_) {
    ForEachGradient(common_.units()[other], [&](const at::Tensor& slice) {
      hidden.emplace_back(slice, slice.grad());
      slice.mutable_grad().reset();
    });
  }
  absl::Status status;
  status.Update(
      TorchToStatus(absl::StrCat("the step of unit ", common_.name(unit)),
                    [&] { status = step(unit); }));
  for (const auto& [slice, gradient] : hidden) slice.mutable_grad() = gradient;
  return status;
}

void UnitSteps::Drop() {
  for (int unit : expected_) {
    ForEachGradient(common_.units()[unit], [](const at::Tensor& slice) {
      slice.mutable_grad().reset();
    });
  }
  expected_.clear();
}

}  // namespace fsdp
