#include "fsdp/setup/flats.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <map>
#include <vector>

#include "absl/status/statusor.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/layout.h"
#include "fsdp/precision/mixed_precision.h"
#include "fsdp/setup/module_tree.h"
#include "fsdp/setup/shard_plan.h"
#include "fsdp/setup/unit_plan.h"

namespace fsdp {

std::map<FlatKind, FlatParameters> FlatsOf(const ModuleTree& tree,
                                           const PlannedUnit& planned) {
  std::map<FlatKind, FlatParameters> by_kind;
  for (size_t i = 0; i < planned.unit.parameters.size(); ++i) {
    const OwnedParameter& owned = planned.unit.parameters[i];
    const std::vector<at::Tensor>& tensors = tree.parameters[owned.parameter];
    by_kind[{tensors.front().scalar_type(), planned.compute_dtypes[i],
             !tensors.front().requires_grad()}]
        .push_back({owned.names.front(), tensors});
  }
  return by_kind;
}

absl::StatusOr<flat_param::FlatLayout> LayoutOf(
    const FlatParameters& parameters, const FlatKind& kind, int ranks) {
  const bool narrows =
      c10::elementSize(kind.computed) < c10::elementSize(kind.stored);
  return flat_param::LayoutOf(parameters, narrows ? kind.computed : kind.stored,
                              ranks);
}

// What keeps its dtype is reduced in it, too.
GradientDtypes GradientDtypesOf(const PlannedUnit& planned,
                                const FlatKind& kind) {
  const MixedPrecision& precision = planned.options.precision;
  const c10::ScalarType stored = kind.stored;
  const bool kept = kind.computed != precision.ParamDtype(stored);
  const c10::ScalarType reduced = kept && !precision.reduce_dtype.has_value()
                                      ? stored
                                      : precision.ReduceDtype(stored);
  return {reduced, precision.keep_low_precision_grads ? reduced : stored};
}

bool AnyTrainable(const FlatParameters& parameters) {
  return std::any_of(
      parameters.begin(), parameters.end(),
      [](const flat_param::NamedParameter& parameter) {
        return std::any_of(
            parameter.tensors.begin(), parameter.tensors.end(),
            [](const at::Tensor& tensor) { return tensor.requires_grad(); });
      });
}

}  // namespace fsdp
