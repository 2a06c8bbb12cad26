// The values with which a training has ended.
#ifndef FSDP_TESTING_TRAINED_VALUES_H_
#define FSDP_TESTING_TRAINED_VALUES_H_

#include <torch/optim/optimizer.h>

#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {

using Values = std::map<std::string, at::Tensor>;  // by name

// Returns whole parameters, buffers and optimizer states. A collective.
absl::StatusOr<Values> ValuesOf(ShardedModuleBase& model,
                                torch::optim::Optimizer& optimizer);

// Checks that buffers nearly equal those of `expected`.
absl::Status SameBuffers(const torch::nn::Module& module,
                         const torch::nn::Module& expected);

// Returns an error if names or bits differ.
absl::Status CheckEqual(const Values& actual, const Values& expected);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_TRAINED_VALUES_H_
