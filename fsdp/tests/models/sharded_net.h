// A sharded net, and a check that it is as good as new.
#ifndef FSDP_TESTS_MODELS_SHARDED_NET_H_
#define FSDP_TESTS_MODELS_SHARDED_NET_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"

namespace fsdp::sharded_net {

using ::fsdp::comm::Communicator;
using ::fsdp::testing::BlockUnits;
using ::fsdp::testing::NetImpl;

inline constexpr int64_t kDim = 4;
inline constexpr int kRanks = 2;

absl::StatusOr<FullyShardedDataParallel<NetImpl>> ShardNet(
    Communicator& communicator, const Options& options = BlockUnits());

// Checks that a step has the losses and gradients of a model that has never
// been misused.
absl::Status CheckStepIsExact(FullyShardedDataParallel<NetImpl>& model,
                              Communicator& communicator);

}  // namespace fsdp::sharded_net

#endif  // FSDP_TESTS_MODELS_SHARDED_NET_H_
