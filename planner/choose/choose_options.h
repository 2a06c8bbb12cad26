// Chooses the options of a model before it is sharded.
//
//   fsdp::AutoOptions wanted;
//   wanted.memory_bytes = int64_t{8} << 30;
//   wanted.rows = 16;
//   wanted.loss = [&](int64_t rows) { return Loss(net->forward(Some(rows))); };
//   wanted.base.wrap_policy = fsdp::WrapModules<BlockImpl>();
//   auto choice = fsdp::ChooseOptions(net, ranks, wanted);
//   if (!choice.ok()) return choice.status();
//   auto model = fsdp::FullyShard(net, ranks, choice->options);
#ifndef PLANNER_CHOOSE_CHOOSE_OPTIONS_H_
#define PLANNER_CHOOSE_CHOOSE_OPTIONS_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "comm/mesh.h"
#include "fsdp/describe/memory_plan.h"
#include "fsdp/options/options.h"
#include "planner/choose/candidates.h"
#include "planner/choose/step_costs.h"

namespace fsdp {

// The same on all ranks, except for what `loss` computes.
struct AutoOptions {
  // The bytes that a rank may use, of the memory in which the model lies, for
  // shards, gradients, optimizer states, gathered units, buffers and
  // activations together. What the program needs besides comes on top.
  // Positive.
  int64_t memory_bytes = 0;

  // Computes the loss of the module, as it is, on `rows` rows of a batch. It is
  // called with 1, 2 and `AutoOptions::rows`, three times each, to measure what
  // a step computes and keeps; the last only if that fits the memory. Nothing
  // is trained, and all ranks call it at once, without each other. Parameters
  // that are deferred, or computed in another dtype, are zeros meanwhile.
  std::function<at::Tensor(int64_t rows)> loss;
  // The rows of a rank's batch. Positive.
  int64_t rows = 1;

  // The optimizer's state, and the number of backwards of a step.
  MemoryPlanOptions memory;

  // Options that are not chosen stay: precision, ignore, init, gradients, ...
  // base.wrap_policy says which modules may be units, and base.recompute.units
  // which units may be recomputed (unset: all). These must be unset: quantize,
  // configure_unit, unit.backward_group_size, and offload's tiers,
  // memory_budget and keep.
  //
  // Files may be used if base.offload names a directory, or stores by
  // make_store; for a model on a device `host_bytes` of the host's memory may
  // be used per rank. Both need this library's optimizers.
  Options base;
  int64_t host_bytes = 0;
  // If false, no units are recomputed.
  bool may_recompute = true;

  // If unset, they are measured, which takes about a second.
  std::optional<StepCosts> costs;
};

struct AutoChoice {
  Options options;
  // The memory plan of the model sharded with them, as its PlanMemory()
  // returns.
  MemoryPlan plan;
  // The most bytes of activations, and of gradients until they are reduced.
  int64_t activations = 0;
  // All candidates, and the index of the chosen one.
  std::vector<Candidate> considered;
  int chosen = 0;
  int64_t memory_bytes = 0;

  double step_seconds() const { return considered[chosen].seconds; }
  // Returns a line per candidate that says why it was not taken; see TableOf().
  std::string ToString() const {
    return TableOf(considered, chosen, memory_bytes);
  }
};

// Compares combinations of units, strategy, prefetching, recomputation and
// tiers by the memory plan and a simulated step, and returns the fastest that
// fits; of those that are as fast (kSameSpeed), the one with the least memory.
// The strategies are those that `mesh` allows, on two dimensions hybrid ones,
// too. Collective; the result is the same on all ranks, from rank 0's
// measurements. The module is left as it was, deferred tensors included.
//
// If one rank refuses something, all return the same error:
//   InvalidArgument    numbers are not positive, `loss` is null, options leave
//                      nothing to choose, or options or models differ
//   ResourceExhausted  nothing fits; the text says what the smallest lacks
// or an error of FullyShard() for the module with `base`, or what `loss`
// throws.
absl::StatusOr<AutoChoice> ChooseOptions(
    const std::shared_ptr<torch::nn::Module>& module, const comm::Mesh& mesh,
    const AutoOptions& options);

// Does the same over the ranks of a group, a mesh of one dimension.
absl::StatusOr<AutoChoice> ChooseOptions(
    const std::shared_ptr<torch::nn::Module>& module,
    std::shared_ptr<comm::Communicator> ranks, const AutoOptions& options);

}  // namespace fsdp

#endif  // PLANNER_CHOOSE_CHOOSE_OPTIONS_H_
