// What tests of whole parameters do around them.
#ifndef FSDP_TESTS_STATE_FULL_PARAMS_CHECKS_H_
#define FSDP_TESTS_STATE_FULL_PARAMS_CHECKS_H_

#include <torch/nn/module.h>

#include "absl/status/status.h"
#include "fsdp/testing/sharded_toy.h"

namespace fsdp::testing {

// A step of one's own data.
absl::Status Backward(toy::Model& model);

// Whether all parameters of `net` have the values they were made with.
absl::Status CheckInitialValues(const torch::nn::Module& net);

}  // namespace fsdp::testing

#endif  // FSDP_TESTS_STATE_FULL_PARAMS_CHECKS_H_
