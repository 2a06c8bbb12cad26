// A sharded toy model, and whether its parameters are freed.
#ifndef FSDP_TESTING_SHARDED_TOY_H_
#define FSDP_TESTING_SHARDED_TOY_H_

#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing::toy {

inline constexpr int64_t kDim = 5;
inline constexpr int kBlocks = 2;

using Model = FullyShardedDataParallel<NetImpl>;

absl::StatusOr<Model> MakeModel(comm::Communicator& world,
                                const Options& options = BlockUnits());

// Returns whether LibTorch refuses to read it.
bool IsFreed(const at::Tensor& parameter);

// Returns an error with the parameter of `module` that is not freed.
absl::Status CheckAllFreed(const torch::nn::Module& module);

}  // namespace fsdp::testing::toy

#endif  // FSDP_TESTING_SHARDED_TOY_H_
