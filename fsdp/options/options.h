// What a user may choose about a sharded model.
#ifndef FSDP_OPTIONS_OPTIONS_H_
#define FSDP_OPTIONS_OPTIONS_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/options/quantization.h"
#include "fsdp/options/wrap_policy.h"
#include "fsdp/precision/mixed_precision.h"

// How a checkpointed region keeps what backward computes with again.

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace fsdp {

class ActivationOffload;

struct CheckpointOptions {
  // Compute with the same random numbers the second time: those of the default
  // generators of the CPU and of the devices of tensor arguments. Costs a copy
  // of the generators' states per region.
  bool preserve_rng_state = true;

  // Give buffers the values that they had before the function ran a second
  // time, so that BatchNorm counts a batch once. Found are those of the sharded
  // model whose units run around the region or inside it, and of `modules`:
  // name there what else the function changes. Costs a copy of them while it
  // runs.
  bool restore_buffers = true;
  std::vector<std::shared_ptr<torch::nn::Module>> modules = {};

  // Where arguments are between forward and backward (see
  // activation_offload.h); null: they stay in memory. One for all regions of a
  // rank. A graph keeps it alive.
  std::shared_ptr<ActivationOffload> offload;
};

// What is sharded, and for how long parameters are whole. k: backwards per
// optimizer step, all but the last under NoSync; n: units.
enum class ShardingStrategy {
  kFullShard,       // ZeRO-3: whole while the unit computes; k(2n-1) gathers
  kShardGradOp,     // ZeRO-2: whole from forward to backward; kn gathers
  kShardOptimizer,  // ZeRO-1: whole until the backward that synchronises, and
                    // under NoSync gradients, too; n gathers
  kNoShard,         // DDP: always whole; an all-reduce of gradients
  // Sharded in a row of the mesh and replicated across rows: reductions are a
  // reduce-scatter in the row and an all-reduce across.
  kHybridShard,        // as kFullShard in the row
  kHybridShardGradOp,  // as kShardGradOp in the row
};

const char* ToString(ShardingStrategy strategy);

// Choices that units may make each for themselves.
struct UnitOptions {
  ShardingStrategy strategy = ShardingStrategy::kFullShard;
  // With a strategy that frees after forward: keep, between forward and
  // backward, as much as a group of this many consecutive ranks of the row
  // needs to gather among themselves. Divides the row. Unset: keep the shard
  // only.
  std::optional<int> backward_group_size = std::nullopt;
  MixedPrecision precision;
};

// Units whose forward backward runs again, instead of keeping what it has
// computed: as if each call of theirs were an fsdp::CheckpointWith() (see
// checkpoint.h) with these options; buffers of the unit's modules are found
// without being named.
struct RecomputeOptions {
  // Asked as `wrap_policy` is, after it. Each module that is chosen has to be a
  // unit, and one has to be. With `transparent`, of units that are called by
  // fsdp::Forward() or are children of a Sequential; the first forward refuses
  // others.
  WrapPolicy units;
  CheckpointOptions options;
};

// Modules with everything below them, and parameters by name, that stay as they
// are: neither sharded nor broadcast nor reduced.
struct IgnoreOptions {
  std::function<bool(const std::string& path, const torch::nn::Module& module)>
      module;
  std::function<bool(const std::string& name, const at::Tensor& parameter)>
      parameter;
};

// Start the next unit's all-gather while this one computes.
struct PrefetchOptions {
  bool forward = true;
  bool backward = true;
};

// The values that training starts from.
struct InitOptions {
  // Rank 0's parameters and buffers. Without it, every rank's own values are
  // kept, which is right only where all ranks have the same.
  bool broadcast = true;

  // Called for each module whose own parameters or buffers are deferred (see
  // deferred_init.h), when its unit is sharded: to give them other values than
  // the constructor has, from a file for example. They have memory then, those
  // of modules inside may not. The default generator is seeded by `seed` and
  // the path. With `broadcast` on rank 0 only. An error is that of sharding.
  std::function<absl::Status(const std::string& path,
                             torch::nn::Module& module)>
      module;
  uint64_t seed = 0;

  // Parameters, by the names of NamedShards(), whose values the program
  // loads before it uses them, from files for example: they are neither drawn
  // nor broadcast. A forward, a state dict or a save before then is refused
  // and names one that was not loaded. May be null.
  std::function<bool(const std::string& name)> loaded_later;
};

// What sums of gradients are divided by. Both are positive.
struct GradientOptions {
  // Unset: the number of ranks. 1 makes gradients sums.
  std::optional<double> divide_factor = std::nullopt;
  // The part of it that gradients are divided by before the reduction; the rest
  // comes after it. Unset: all of it after, or before where the communicator
  // adds scaled inputs up faster (Communicator::PrefersScaledInputs), or about
  // half each for fp16.
  std::optional<double> predivide_factor = std::nullopt;
};

// Mistakes that are looked for.
struct ModelChecks {
  // Compare the order of collectives between ranks at the end of every backward
  // that reduces: an all-reduce of 16 bytes.
  bool order = true;

  // Refuse a model whose every trainable parameter something else refers to:
  // that is usually an optimizer, which would go on without training anything.
  bool outside_references = true;
};

// The same on all ranks. The defaults are ZeRO stage 3.
struct Options {
  // Units besides the root, which owns what no other unit does. Without a
  // policy the whole model is one unit, and nothing is saved while it computes.
  WrapPolicy wrap_policy;

  // Of all units, and for the root and each module that `wrap_policy` has
  // chosen a last word about its own.
  UnitOptions unit;
  std::function<void(const std::string& path, const torch::nn::Module& module,
                     UnitOptions& unit)>
      configure_unit;

  RecomputeOptions recompute;
  IgnoreOptions ignore;
  PrefetchOptions prefetch;
  InitOptions init;
  GradientOptions gradients;
  ModelChecks checks;

  // Free the root after forward, too, where its strategy says so of units.
  // Backward needs it first.
  bool reshard_root_after_forward = false;

  // Find out from the operators that run when a unit's forward and backward
  // begin and end, so that parents may call their children directly. Costs
  // every operator up to a microsecond; see transparent.h.
  bool transparent = false;

  // Abort the communicator when a forward or Backward() fails half-way, so
  // that the peers end at once instead of waiting. False where all ranks fail
  // alike and go on, with an input that all refuse for example.
  bool abort_on_failure = true;

  // Rank 0 writes the tree of units and the memory plan to stderr.
  bool verbose = false;

  // Where the ranks of a group share a host's memory, let all compute with one
  // copy of the parameters: those that are computed in the dtype they are
  // stored in rest side by side and are never copied; of others there is one
  // copy in the compute dtype, of which each rank writes its part once a step.
  // Shards must then be written only between steps, as optimizers do.
  bool share_memory = true;

  // Gathers of parameters and sums of gradients that send int8.
  Quantization quantize;

  // Where shards, gradients and optimizer states rest between uses.
  OffloadOptions offload;

  // Longest wait for a collective; positive. Unset: the communicator's default.
  std::optional<absl::Duration> timeout = std::nullopt;
};

}  // namespace fsdp

#endif  // FSDP_OPTIONS_OPTIONS_H_
