// Optimizers over the shards of a model, and what is wrong with one.
#ifndef FSDP_OPTIMIZER_CHECK_H_
#define FSDP_OPTIMIZER_CHECK_H_

#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "fsdp/fully_sharded_data_parallel.h"

namespace torch::optim {
class LBFGS;
class Optimizer;
}  // namespace torch::optim

namespace fsdp {

// An optimizer over all shards of `model`:
//   auto optimizer = fsdp::MakeOptimizer<torch::optim::AdamW>(
//       *model, torch::optim::AdamWOptions(3e-4));
template <typename Optimizer, typename... Args>
Optimizer MakeOptimizer(const ShardedModuleBase& model, Args&&... args) {
  static_assert(!std::is_base_of_v<torch::optim::LBFGS, Optimizer>,
                "LBFGS computes over all elements of all parameters, and a "
                "rank has a part of them: use an element-wise optimizer");
  return Optimizer(model.Parameters(), std::forward<Args>(args)...);
}

struct OptimizerCheckOptions {
  enum class Missing {
    kRefuse,
    kWarn,
    kAccept,
  };
  // Trainable shards that are in no group. They would never change; that may be
  // meant, or another optimizer has them.
  Missing missing = Missing::kRefuse;
  // Leaves that are not of this model, such as those of a second one.
  bool allow_others = false;
};

// Whether steps of `optimizer` train `model`. Local, with the same answer on
// all ranks that have made the same groups; nothing is sent.
//   InvalidArgument     LBFGS; a shard that is in the optimizer twice; shards
//                       or others that `options` do not allow
//   FailedPrecondition  the module's own parameters, as in an optimizer that
//                       was made before sharding; one that cannot step what is
//                       offloaded; a shard whose data was replaced
absl::Status CheckOptimizer(
    const ShardedModuleBase& model, const torch::optim::Optimizer& optimizer,
    const OptimizerCheckOptions& options = OptimizerCheckOptions());

}  // namespace fsdp

#endif  // FSDP_OPTIMIZER_CHECK_H_
