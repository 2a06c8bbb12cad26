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
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "comm/mesh.h"
#include "fsdp/memory/memory_plan.h"
#include "fsdp/options/options.h"

namespace fsdp {

// The costs on one rank while all do the same. Rates are positive, in bytes per
// second, and may be infinite; times are not negative, in seconds.
struct StepCosts {
  double memory_bandwidth = 0;  // read plus written: a copy of n bytes is 2n
  // An all-gather or reduce-scatter of n bytes on w ranks takes
  // latency + n (w - 1) / w / bandwidth. If ranks share memory, an all-gather
  // takes only the latency.
  double latency = 0;
  double gather_bandwidth = 0;
  double reduce_bandwidth = 0;
  bool overlaps = false;  // collectives run beside what a rank computes
  // To and from Tier::kCpu, for a model on a device, and Tier::kSsd.
  double host_bandwidth = 0;
  double ssd_bandwidth = 0;

  // InvalidArgument: a rate is not positive, or a time is negative.
  absl::Status Validate() const;
};

// The costs as text, exactly.
std::string ToText(const StepCosts& costs);

// Measures StepCosts by copies and collectives, in about a second.
// Returns rank 0's numbers on all ranks. Collective. Collectives are measured
// with `bytes`, the size of a unit. `directory` is one of an SSD; empty: none.
// Errors are those of Work::Wait(), what LibTorch throws, and what the system
// says of the directory.
absl::StatusOr<StepCosts> MeasureCosts(comm::Communicator& ranks,
                                       c10::Device device, int64_t bytes,
                                       const std::string& directory,
                                       absl::Duration timeout);

// A combination of options, and what is predicted for one rank with it.
struct Candidate {
  std::string units;       // "8 units"
  std::string strategy;    // "full shard"
  bool prefetch = true;    // units are gathered ahead, in both directions
  bool recompute = false;  // the units that may be are recomputed
  std::string rests;       // "memory", "ssd"

  MemoryPlan plan;          // without activations
  int64_t activations = 0;  // bytes, with the gradients that autograd holds
  double seconds = 0;       // of a step
  std::string refused;      // why it is impossible; empty: it is possible

  // The most bytes of the model's memory.
  int64_t bytes() const { return plan.total() + activations; }
  // Returns whether it is possible in so many bytes.
  bool Fits(int64_t memory_bytes) const {
    return refused.empty() && bytes() <= memory_bytes;
  }
};

// Candidates whose predicted step is longer than the fastest by less than this
// part count as equally fast: they cannot be told apart.
inline constexpr double kSameSpeed = 0.02;

// Returns the index of a candidate that fits: of those that are as fast as the
// fastest, the one with the least memory, of equals the first.
// ResourceExhausted says that none fits, and what the smallest lacks.
absl::StatusOr<int> ChooseCandidate(absl::Span<const Candidate> candidates,
                                    int64_t memory_bytes);

// Returns a table of at most `max_lines` lines, with why each was not taken:
// the chosen one; others that fit, the fastest first; those that do not, the
// smallest first; impossible ones. Those that differ in strategy and
// prefetching alone, to no effect, share a line. `chosen` is negative if none
// was.
std::string TableOf(absl::Span<const Candidate> candidates, int chosen,
                    int64_t memory_bytes, int max_lines = 24);

// Arguments of ChooseOptions(). The same on all ranks, except for what `loss`
// computes.
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
  int64_t host_bytes = 0;  // 0: none of the host's
  // If false, no units are recomputed.
  bool may_recompute = true;

  // If unset, they are measured, which takes about a second.
  std::optional<StepCosts> costs;
};

// Options that were chosen, and what else was considered.
struct AutoChoice {
  Options options;  // for FullyShard()
  // The memory plan of the model sharded with them, as its PlanMemory()
  // returns.
  MemoryPlan plan;
  // The most bytes of activations, and of gradients until they are reduced.
  int64_t activations = 0;
  // All candidates, and the index of the chosen one.
  std::vector<Candidate> considered;
  int chosen = 0;
  int64_t memory_bytes = 0;  // as AutoOptions had it

  // The predicted time of a step with `options`.
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
// too. Every collective is taken to be as fast as one of all ranks, so that
// rows within a host do not make hybrid ones faster. Collective; the result is
// the same on all ranks, from rank 0's measurements. The module is left as it
// was, deferred tensors included.
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
