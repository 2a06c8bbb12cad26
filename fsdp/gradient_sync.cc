#include "fsdp/gradient_sync.h"

#include <torch/nn/module.h>

#include <optional>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/model/unit_handle.h"

namespace fsdp {
namespace {

using SetOne = absl::FunctionRef<absl::Status(ShardedModel& model, int unit)>;

absl::Status ForEachUnit(torch::nn::Module& module, bool recurse, SetOne set) {
  bool any = false;
  const auto set_if_unit = [&](const torch::nn::Module& candidate) {
    const std::optional<UnitHandle> unit = FindUnit(candidate);
    if (!unit.has_value()) return absl::OkStatus();
    any = true;
    return set(*unit->model(), unit->unit());
  };
  FSDP_RETURN_IF_ERROR(set_if_unit(module));
  if (recurse) {
    for (const auto& inner : module.modules(/*include_self=*/false)) {
      FSDP_RETURN_IF_ERROR(set_if_unit(*inner));
    }
  }
  if (any) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "module ", module.name(), recurse ? " is and has no unit" : " is no unit",
      " of a sharded model, so it has no gradients to reduce: see "
      "Describe() for the units"));
}

}  // namespace

absl::Status SetRequiresGradientSync(torch::nn::Module& module, bool required,
                                     bool recurse) {
  return ForEachUnit(module, recurse, [&](ShardedModel& model, int unit) {
    return model.SetUnitSynchronizes(unit, required);
  });
}

absl::Status SetRequiresAllReduce(torch::nn::Module& module, bool required,
                                  bool recurse) {
  return ForEachUnit(module, recurse, [&](ShardedModel& model, int unit) {
    return model.SetUnitAllReduces(unit, required);
  });
}

}  // namespace fsdp
