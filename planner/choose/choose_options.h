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

// The same on all ranks, but for what `loss` computes.
struct AutoOptions {
  // Of the memory that the model lies in, what a rank may use for shards,
  // gradients, optimizer states, gathered units, buffers and activations
  // together. What the program needs besides comes on top. Positive.
  int64_t memory_bytes = 0;

  // A forward of the module, as it is, on `rows` rows of a batch: the loss.
  // Called with 1, 2 and `AutoOptions::rows` in turn, three times each, to see
  // what a step computes and keeps; the last only where that fits the memory.
  // Nothing is trained, and all ranks do it at once, without each other.
  // Parameters that are deferred, or computed in another dtype, are zeros then.
  std::function<at::Tensor(int64_t rows)> loss;
  // Of a rank's batch. Positive.
  int64_t rows = 1;

  // What the optimizer keeps, and backwards of a step.
  MemoryPlanOptions memory;

  // What is not chosen stays: precision, ignore, init, gradients, ... Which
  // modules may be units says base.wrap_policy, which may be recomputed
  // base.recompute.units (unset: every unit). Not with quantize,
  // configure_unit, unit.backward_group_size, or tiers.
  //
  // Where base.offload names a directory, or stores by make_store, files may be
  // used, and with `host_bytes` the host's memory: so many bytes of a rank, of
  // a model on a device. Both need this library's optimizers.
  Options base;
  int64_t host_bytes = 0;
  // Whether units may be recomputed at all.
  bool may_recompute = true;

  // Unset: measured, which takes about a second.
  std::optional<StepCosts> costs;
};

struct AutoChoice {
  Options options;
  // That of the model sharded with them, as its PlanMemory() has it.
  MemoryPlan plan;
  // Bytes at most of activations, and of gradients until they are reduced.
  int64_t activations = 0;
  // All that was looked at, and the index of what was chosen.
  std::vector<Candidate> considered;
  int chosen = 0;
  int64_t memory_bytes = 0;

  double step_seconds() const { return considered[chosen].seconds; }
  // A line for each, with why it was not taken; see TableOf().
  std::string ToString() const {
    return TableOf(considered, chosen, memory_bytes);
  }
};

// Compares combinations of units, strategy, prefetching, recomputation and
// tiers by the memory plan and a simulated step, and takes the fastest that
// fits; of those that are as fast (kSameSpeed), the one with the least memory.
// Strategies are those that `mesh` allows: with two dimensions hybrid ones,
// too. Collective; the same on all ranks, by rank 0's measurements. The module
// is as it was, deferred tensors included.
//
// What one rank refuses all refuse with the same text:
//   InvalidArgument    numbers that are not positive, no `loss`, options that
//                      leave nothing to choose, options or models that differ
//   ResourceExhausted  nothing fits, with what the smallest lacks
// and what FullyShard() says of the module with `base`, and `loss` throws.
absl::StatusOr<AutoChoice> ChooseOptions(
    const std::shared_ptr<torch::nn::Module>& module, const comm::Mesh& mesh,
    const AutoOptions& options);

// The same over the ranks of a group, a mesh of one dimension.
absl::StatusOr<AutoChoice> ChooseOptions(
    const std::shared_ptr<torch::nn::Module>& module,
    std::shared_ptr<comm::Communicator> ranks, const AutoOptions& options);

}  // namespace fsdp

#endif  // PLANNER_CHOOSE_CHOOSE_OPTIONS_H_
