// A sharded toy model, what its parameters are, and whether they are freed.
#ifndef FSDP_TESTING_SHARDED_TOY_H_
#define FSDP_TESTING_SHARDED_TOY_H_

#include <c10/util/Exception.h>

#include "fsdp/testing/sharded_test.h"  // IWYU pragma: export

namespace fsdp::testing::toy {

inline constexpr int64_t kDim = 5;
inline constexpr int kBlocks = 2;

using Model = FullyShardedDataParallel<NetImpl>;

inline absl::StatusOr<Model> MakeModel(Communicator& world,
                                       const Options& options = BlockUnits()) {
  return FullyShard(MakeNet(kDim, kBlocks), Unowned(world), options);
}

// Does `body` with a model on each of `ranks` ranks.
inline absl::Status OnRanks(int ranks,
                            const std::function<absl::Status(Model&)>& body,
                            const Options& options = BlockUnits()) {
  return RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, options));
    return body(model);
  });
}

// Runs a backward on this rank's own data.
inline absl::Status Backward(Model& model) {
  const at::Tensor x = Rows(model->communicator().rank(), 3, kDim);
  return model->Backward(Loss(model->forward(x).to(at::kFloat), x));
}

// Returns whether LibTorch refuses to read it.
inline bool IsFreed(const at::Tensor& parameter) {
  try {
    (void)parameter.sum();
    return false;
  } catch (const c10::Error&) {
    return true;
  }
}

// Returns an error with the parameter of `module` that is not freed.
inline absl::Status CheckAllFreed(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) {
    FSDP_RETURN_IF_ERROR(Check(IsFreed(item.value()), item.key() + " is left"));
  }
  return absl::OkStatus();
}

// Checks that all parameters of `net` have their initial values.
inline absl::Status CheckInitialValues(const torch::nn::Module& net) {
  const auto expected = MakeNet(kDim, kBlocks);
  for (const auto& item : expected->named_parameters()) {
    const at::Tensor* actual = net.named_parameters().find(item.key());
    FSDP_RETURN_IF_ERROR(Check(actual != nullptr, item.key()));
    FSDP_RETURN_IF_ERROR(
        Check(at::equal(*actual, item.value()), "values of " + item.key()));
  }
  return absl::OkStatus();
}

}  // namespace fsdp::testing::toy

#endif  // FSDP_TESTING_SHARDED_TOY_H_
