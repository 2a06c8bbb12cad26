// Makes optimizers over the shards of a model, and checks them.
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
#include "ranges/tensor_range.h"

namespace torch::optim {
class LBFGS;
}  // namespace torch::optim

namespace fsdp {

// Throws StatusError, InvalidArgument, if `optimizer` steps pieces of a
// parameter differently from the whole, as LAMB, Muon and Adafactor do, or if
// its step of one parameter depends on others. It tries a few steps on tensors
// of its own, and accepts an optimizer that needs more than that to step.
// Groups, states and gradients are as before; other counters of steps in the
// optimizer count these, too.
void ProbeOptimizer(torch::optim::Optimizer& optimizer);

// Makes an optimizer over all shards of `model`:
//   auto optimizer = fsdp::MakeOptimizer<torch::optim::AdamW>(
//       *model, torch::optim::AdamWOptions(3e-4));
// Probes a second one, made with the same arguments, and throws as
// ProbeOptimizer() does.
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

// Returns the trainable shards of `model` as two groups of an optimizer, both
// with `options`: parameters of two dimensions or more, and the others, such as
// biases and norms, without weight decay.
//   fsdp::FusedAdamW optimizer(fsdp::DecayGroups(*model, options), options);
template <typename Options>
std::vector<torch::optim::OptimizerParamGroup> DecayGroups(
    const ShardedModuleBase& model, const Options& options) {
  std::vector<at::Tensor> matrices, others;
  for (const TensorRange& named : model.Ranges()) {
    if (!named.values.requires_grad()) continue;
    (named.sizes.size() >= 2 ? matrices : others).push_back(named.values);
  }
  Options none = options;
  none.weight_decay(0);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, std::make_unique<Options>(options));
  groups.emplace_back(others, std::make_unique<Options>(none));
  return groups;
}

// Selects what CheckOptimizer() allows.
struct OptimizerCheckOptions {
  // The ways to treat shards that no group has.
  enum class Missing {
    kRefuse,
    kWarn,
    kAccept,
  };
  // Selects what happens to trainable shards in no group, which would never
  // change unless another optimizer has them.
  Missing missing = Missing::kRefuse;
  // Accepts leaves that do not belong to this model but, say, to a second one.
  bool allow_others = false;
};

// Checks that steps of `optimizer` train `model`. It sends nothing; all ranks
// that have made the same groups get the same answer.
//   InvalidArgument     it is LBFGS, or ProbeOptimizer() refuses it; a shard is
//                       in it twice; `options` do not allow missing shards or
//                       other leaves
//   FailedPrecondition  it has the module's own parameters, as an optimizer
//                       does that was made before sharding; it cannot step
//                       shards that are offloaded; the data of a shard or of a
//                       module's tensor was replaced
absl::Status CheckOptimizer(
    const ShardedModuleBase& model, const torch::optim::Optimizer& optimizer,
    const OptimizerCheckOptions& options = OptimizerCheckOptions());

}  // namespace fsdp

#endif  // FSDP_OPTIMIZER_CHECK_H_
