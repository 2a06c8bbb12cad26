// Optimizers over the shards of a model, and what is wrong with one.
#ifndef FSDP_OPTIMIZER_CHECK_H_
#define FSDP_OPTIMIZER_CHECK_H_

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/model/named_shard.h"

namespace torch::optim {
class LBFGS;
}  // namespace torch::optim

namespace fsdp {

// Throws StatusError, InvalidArgument, where steps of `optimizer` on pieces of
// parameters are not those on the whole, as those of LAMB, Muon or Adafactor,
// or depend on other parameters: found out by a few steps on other tensors, so
// not of one that needs more to step. Groups, states and gradients are left as
// they were; what else it remembers of its steps counts these.
void ProbeOptimizer(torch::optim::Optimizer& optimizer);

// An optimizer over all shards of `model`:
//   auto optimizer = fsdp::MakeOptimizer<torch::optim::AdamW>(
//       *model, torch::optim::AdamWOptions(3e-4));
// Throws what ProbeOptimizer() does of another one with the same arguments.
template <typename Optimizer, typename... Args>
Optimizer MakeOptimizer(const ShardedModuleBase& model, Args&&... args) {
  static_assert(!std::is_base_of_v<torch::optim::LBFGS, Optimizer>,
                "LBFGS computes over all elements of all parameters, and a "
                "rank has a part of them: use an element-wise optimizer");
  if constexpr (std::is_constructible_v<Optimizer, std::vector<at::Tensor>,
                                        const std::decay_t<Args>&...>) {
    Optimizer probed(std::vector<at::Tensor>(), std::as_const(args)...);
    ProbeOptimizer(probed);
  }
  return Optimizer(model.Parameters(), std::forward<Args>(args)...);
}

// The trainable shards of `model` as an optimizer's groups, both with
// `options`: parameters of two dimensions and more, and the others, biases and
// norms, without its weight decay.
//   fsdp::FusedAdamW optimizer(fsdp::DecayGroups(*model, options), options);
template <typename Options>
std::vector<torch::optim::OptimizerParamGroup> DecayGroups(
    const ShardedModuleBase& model, const Options& options) {
  std::vector<at::Tensor> matrices, others;
  for (const NamedShard& named : model.NamedShards()) {
    if (!named.shard.requires_grad()) continue;
    (named.sizes.size() >= 2 ? matrices : others).push_back(named.shard);
  }
  Options none = options;
  none.weight_decay(0);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, std::make_unique<Options>(options));
  groups.emplace_back(others, std::make_unique<Options>(none));
  return groups;
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
//   InvalidArgument     LBFGS, and what ProbeOptimizer() finds; a shard that is
//   in the optimizer twice; shards
//                       or others that `options` do not allow
//   FailedPrecondition  the module's own parameters, as in an optimizer that
//                       was made before sharding; one that cannot step what is
//                       offloaded; a shard whose data was replaced
absl::Status CheckOptimizer(
    const ShardedModuleBase& model, const torch::optim::Optimizer& optimizer,
    const OptimizerCheckOptions& options = OptimizerCheckOptions());

}  // namespace fsdp

#endif  // FSDP_OPTIMIZER_CHECK_H_
