// A sharded net, and whether it is as good as new.
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

// The losses and gradients of a step are what they are in a model that has
// never seen a misuse.
absl::Status CheckStepIsExact(FullyShardedDataParallel<NetImpl>& model,
                              Communicator& communicator);

}  // namespace fsdp::sharded_net

#endif  // FSDP_TESTS_MODELS_SHARDED_NET_H_
