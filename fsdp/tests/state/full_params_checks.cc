#include "fsdp/tests/state/full_params_checks.h"

#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/sharded_toy.h"

namespace fsdp::testing {

absl::Status Backward(toy::Model& model) {
  const at::Tensor x = Rows(model->communicator().rank(), 3, toy::kDim);
  return model->Backward(Loss(model->forward(x).to(at::kFloat), x));
}

absl::Status CheckInitialValues(const torch::nn::Module& net) {
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
