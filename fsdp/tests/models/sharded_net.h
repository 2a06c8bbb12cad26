// A sharded net, and a check that it is as good as new.
#ifndef FSDP_TESTS_MODELS_SHARDED_NET_H_
#define FSDP_TESTS_MODELS_SHARDED_NET_H_

#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing::sharded_net {

inline constexpr int64_t kDim = 4;
inline constexpr int kRanks = 2;

absl::StatusOr<FullyShardedDataParallel<NetImpl>> ShardNet(
    Communicator& communicator, const Options& options = BlockUnits());

// Checks that a step has the losses and gradients of a model that has never
// been misused.
absl::Status CheckStepIsExact(FullyShardedDataParallel<NetImpl>& model,
                              Communicator& communicator);

}  // namespace fsdp::testing::sharded_net

#endif  // FSDP_TESTS_MODELS_SHARDED_NET_H_
