#include "checkpoint/tests/large_plan.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "checkpoint/format/tensor_info.h"

namespace fsdp::checkpoint::testing {

using flat_param::FlatLayout;
using flat_param::ParameterSpec;

LargePlan::LargePlan(int parameters, int ranks) {
  constexpr int kInUnit = 10;
  for (int first = 0; first < parameters; first += kInUnit) {
    std::vector<ParameterSpec> specs;
    for (int i = first; i < first + kInUnit && i < parameters; ++i) {
      const int64_t columns = 37 + i % 11;
      specs.push_back(
          {absl::StrCat("layers.", first / kInUnit, ".part", i, ".weight"),
           {1024, columns},
           {columns, 1}});
    }
    absl::StatusOr<FlatLayout> layout =
        FlatLayout::Create(std::move(specs), sizeof(float), ranks);
    FSDP_CHECK(layout.ok());
    units_.push_back(*std::move(layout));
  }
}

std::vector<TensorGroup> LargePlan::PartsOf(int rank) const {
  const auto options = at::TensorOptions().device(at::kMeta);
  const at::Tensor nothing = at::empty({0}, options);
  std::vector<TensorGroup> groups;
  for (const char* stem :
       {"model", "optimizer/exp_avg", "optimizer/exp_avg_sq"}) {
    TensorGroup group;
    group.stem = stem;
    for (const FlatLayout& unit : units_) {
      for (int i = 0; i < unit.num_parameters(); ++i) {
        const ParameterSpec& parameter = unit.parameter(i);
        const flat_param::Slice part = unit.InParameter(i, rank);
        group.parts.push_back(
            {parameter.name, parameter.sizes, parameter.strides, part.begin,
             part.empty() ? nothing : at::empty({part.numel()}, options)});
      }
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

}  // namespace fsdp::checkpoint::testing
