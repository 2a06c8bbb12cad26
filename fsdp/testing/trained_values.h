// The values with which a training has ended.
#ifndef FSDP_TESTING_TRAINED_VALUES_H_
#define FSDP_TESTING_TRAINED_VALUES_H_

#include <torch/optim/optimizer.h>

#include "fsdp/testing/sharded_test.h"  // IWYU pragma: export

namespace fsdp::testing {

using Values = std::map<std::string, at::Tensor>;  // by name

// Returns whole parameters, buffers and optimizer states. A collective.
inline absl::StatusOr<Values> ValuesOf(ShardedModuleBase& model,
                                       torch::optim::Optimizer& optimizer) {
  Values values;
  FSDP_ASSIGN_OR_RETURN(const StateDict dict, model.GatherStateDict());
  for (const auto& item : dict) values[item.key()] = item.value();
  FSDP_ASSIGN_OR_RETURN(const OptimizerStateDict states,
                        model.GatherOptimizerState(optimizer));
  for (const auto& item : states.tensors) values[item.key()] = item.value();
  return values;
}

// Checks that buffers nearly equal those of `expected`.
inline absl::Status SameBuffers(const torch::nn::Module& module,
                                const torch::nn::Module& expected) {
  const auto buffers = expected.named_buffers();
  for (const auto& item : module.named_buffers()) {
    if (at::allclose(item.value(), buffers[item.key()], 1e-5, 1e-6)) continue;
    return absl::InternalError(absl::StrCat("buffer ", item.key()));
  }
  return absl::OkStatus();
}

// Returns an error if names or bits differ.
inline absl::Status CheckEqual(const Values& actual, const Values& expected) {
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

#endif  // FSDP_TESTING_TRAINED_VALUES_H_
