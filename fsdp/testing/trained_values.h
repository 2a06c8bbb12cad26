// The values with which a training has ended.
#ifndef FSDP_TESTING_TRAINED_VALUES_H_
#define FSDP_TESTING_TRAINED_VALUES_H_

#include <torch/optim/optimizer.h>

#include "base/testing/compare_tensors.h"
#include "fsdp/testing/sharded_test.h"  // IWYU pragma: export

namespace fsdp::testing {

using Values = std::map<std::string, at::Tensor>;  // by name

inline Values ValuesOf(const StateDict& dict) {
  Values values;
  for (const auto& item : dict) values[item.key()] = item.value();
  return values;
}

// Returns copies of parameters and buffers.
inline Values ValuesOf(const torch::nn::Module& module) {
  Values values;
  for (const auto& item : module.named_parameters()) {
    values[item.key()] = item.value().detach().clone();
  }
  for (const auto& item : module.named_buffers()) {
    values[item.key()] = item.value().clone();
  }
  return values;
}

// Returns whole parameters, buffers and optimizer states. A collective.
inline absl::StatusOr<Values> ValuesOf(ShardedModuleBase& model,
                                       torch::optim::Optimizer& optimizer) {
  FSDP_ASSIGN_OR_RETURN(const StateDict dict, model.GatherStateDict());
  Values values = ValuesOf(dict);
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

// Returns an error, which names the first value, if names, dtypes or bits
// differ.
inline absl::Status CheckEqual(const Values& actual, const Values& expected) {
  for (const auto& [name, value] : expected) {
    const auto found = actual.find(name);
    if (found == actual.end()) {
      return absl::InternalError(absl::StrCat("no ", name));
    }
    FSDP_RETURN_IF_ERROR(
        CheckThat(found->second.scalar_type(), Eq(value.scalar_type()), name));
    if (at::equal(found->second, value)) continue;
    return absl::InternalError(absl::StrCat(
        name, " is off by up to ", LargestDifference(found->second, value)));
  }
  for (const auto& [name, value] : actual) {
    if (expected.count(name) > 0) continue;
    return absl::InternalError(absl::StrCat("there is ", name));
  }
  return absl::OkStatus();
}

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_TRAINED_VALUES_H_
