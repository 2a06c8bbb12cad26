#include "fsdp/testing/sharded_toy.h"

#include <c10/util/Exception.h>

namespace fsdp::testing::toy {

absl::StatusOr<Model> MakeModel(comm::Communicator& world,
                                const Options& options) {
  return FullyShard(MakeNet(kDim, kBlocks), Unowned(world), options);
}

bool IsFreed(const at::Tensor& parameter) {
  try {
    (void)parameter.sum();
    return false;
  } catch (const c10::Error&) {
    return true;
  }
}

absl::Status CheckAllFreed(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) {
    FSDP_RETURN_IF_ERROR(Check(IsFreed(item.value()), item.key() + " is left"));
  }
  return absl::OkStatus();
}

}  // namespace fsdp::testing::toy
