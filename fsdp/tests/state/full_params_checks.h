// Helpers for tests of whole parameters.
#ifndef FSDP_TESTS_STATE_FULL_PARAMS_CHECKS_H_
#define FSDP_TESTS_STATE_FULL_PARAMS_CHECKS_H_

#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/sharded_toy.h"

namespace fsdp::testing {

// Runs a backward on this rank's own data.
inline absl::Status Backward(toy::Model& model) {
  const at::Tensor x = Rows(model->communicator().rank(), 3, toy::kDim);
  return model->Backward(Loss(model->forward(x).to(at::kFloat), x));
}

// Checks that all parameters of `net` have their initial values.
inline absl::Status CheckInitialValues(const torch::nn::Module& net) {
  const auto expected = MakeNet(toy::kDim, toy::kBlocks);
  for (const auto& item : expected->named_parameters()) {
    const at::Tensor* actual = net.named_parameters().find(item.key());
    FSDP_RETURN_IF_ERROR(Check(actual != nullptr, item.key()));
    FSDP_RETURN_IF_ERROR(
        Check(at::equal(*actual, item.value()), "values of " + item.key()));
  }
  return absl::OkStatus();
}

}  // namespace fsdp::testing

#endif  // FSDP_TESTS_STATE_FULL_PARAMS_CHECKS_H_
