// A sharded net, and a check that it is as good as new.
#ifndef FSDP_TESTS_MODELS_SHARDED_NET_H_
#define FSDP_TESTS_MODELS_SHARDED_NET_H_

#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing::sharded_net {

inline constexpr int64_t kDim = 4;
inline constexpr int kRanks = 2;

inline absl::StatusOr<FullyShardedDataParallel<NetImpl>> ShardNet(
    Communicator& communicator, const Options& options = BlockUnits()) {
  return FullyShard(MakeNet(kDim, 2), Unowned(communicator), options);
}

// Checks that a step has the losses and gradients of a model that has never
// been misused.
inline absl::Status CheckStepIsExact(FullyShardedDataParallel<NetImpl>& model,
                                     Communicator& communicator) {
  FSDP_ASSIGN_OR_RETURN(auto fresh, ShardNet(communicator));
  const at::Tensor x = Rows(communicator.rank(), 2, kDim);
  const at::Tensor loss = Loss(model->forward(x), x);
  const at::Tensor expected = Loss(fresh->forward(x), x);
  for (at::Tensor& shard : model->Parameters()) shard.mutable_grad().reset();
  FSDP_RETURN_IF_ERROR(model->Backward(loss));
  FSDP_RETURN_IF_ERROR(fresh->Backward(expected));
  FSDP_RETURN_IF_ERROR(CheckTensor(loss, expected, "loss"));
  for (size_t i = 0; i < fresh->Parameters().size(); ++i) {
    if (!at::equal(model->Parameters()[i].grad(),
                   fresh->Parameters()[i].grad())) {
      return absl::InternalError(absl::StrCat("gradient ", i, " differs"));
    }
  }
  return absl::OkStatus();
}

}  // namespace fsdp::testing::sharded_net

#endif  // FSDP_TESTS_MODELS_SHARDED_NET_H_
