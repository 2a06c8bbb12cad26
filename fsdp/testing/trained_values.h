// What training has come to.
#ifndef FSDP_TESTING_TRAINED_VALUES_H_
#define FSDP_TESTING_TRAINED_VALUES_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fsdp/fully_sharded_data_parallel.h"

namespace fsdp::testing {

using Values = std::map<std::string, at::Tensor>;  // by name

// Parameters, buffers and the optimizer's states, whole. A collective.
absl::StatusOr<Values> ValuesOf(ShardedModuleBase& model,
                                torch::optim::Optimizer& optimizer);

// Shards are their parts of the parameters of `plain`, nearly.
absl::Status CheckShards(const ShardedModuleBase& model,
                         const torch::nn::Module& plain);

// Buffers are those of `expected`, nearly.
absl::Status SameBuffers(const torch::nn::Module& module,
                         const torch::nn::Module& expected);

// An error where there are other names or bits.
absl::Status CheckEqual(const Values& actual, const Values& expected);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_TRAINED_VALUES_H_
