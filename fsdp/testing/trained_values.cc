#include "fsdp/testing/trained_values.h"

#include <ATen/ops/equal.h>
#include <torch/optim/optimizer.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "fsdp/fully_sharded_data_parallel.h"

namespace fsdp::testing {

absl::StatusOr<Values> ValuesOf(ShardedModuleBase& model,
                                torch::optim::Optimizer& optimizer) {
  Values values;
  FSDP_ASSIGN_OR_RETURN(const StateDict dict, model.GatherStateDict());
  for (const auto& item : dict) values[item.key()] = item.value();
  FSDP_ASSIGN_OR_RETURN(const OptimizerStateDict states,
                        model.GatherOptimizerState(optimizer));
  for (const auto& item : states.tensors) values[item.key()] = item.value();
  return values;
}

absl::Status CheckEqual(const Values& actual, const Values& expected) {
  if (actual.size() != expected.size()) {
    return absl::InternalError(
        absl::StrCat(actual.size(), " values instead of ", expected.size()));
  }
  for (const auto& [name, value] : expected) {
    if (at::equal(actual.at(name), value)) continue;
    return absl::InternalError(absl::StrCat(name, " differs"));
  }
  return absl::OkStatus();
}

}  // namespace fsdp::testing
