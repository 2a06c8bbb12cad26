// Helpers for tests of whole parameters.
#ifndef FSDP_TESTS_STATE_FULL_PARAMS_CHECKS_H_
#define FSDP_TESTS_STATE_FULL_PARAMS_CHECKS_H_

#include <torch/nn/module.h>

#include "absl/status/status.h"
#include "fsdp/testing/sharded_toy.h"

namespace fsdp::testing {

// Runs a backward on this rank's own data.
absl::Status Backward(toy::Model& model);

// Checks that all parameters of `net` have their initial values.
absl::Status CheckInitialValues(const torch::nn::Module& net);

}  // namespace fsdp::testing

#endif  // FSDP_TESTS_STATE_FULL_PARAMS_CHECKS_H_
