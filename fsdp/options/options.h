// The options of a sharded model.
#ifndef FSDP_OPTIONS_OPTIONS_H_
#define FSDP_OPTIONS_OPTIONS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "fsdp/options/offload_options.h"

namespace fsdp {

namespace comm {
class GatherExtension;
class QuantizationLog;
struct QuantizationOptions;
}  // namespace comm

// Selects which inputs are cast.
enum class CastInputs {
  kNever,      // none
  kRoot,       // what the user passes to the model
  kEveryUnit,  // what each unit is called with
};

// The dtypes of one unit. Shards, and so optimizer states, keep the dtype that
// the parameters had. The default changes nothing.
struct MixedPrecision {
  // Full parameters, and so the unit's computing. If unset, as stored.
  std::optional<c10::ScalarType> param_dtype;
  // Reductions, and gradients kept whole under NoSync. If unset, param_dtype.
  std::optional<c10::ScalarType> reduce_dtype;
  // Floating-point buffers of the unit's modules. If unset, as they are.
  std::optional<c10::ScalarType> buffer_dtype;
  // Floating-point outputs of the root's forward. If unset, as computed.
  std::optional<c10::ScalarType> output_dtype;

  // Selects where floating-point inputs are cast to param_dtype. Autograd sees
  // the cast: an input that requires grad gets its gradient in its own dtype.
  CastInputs cast_inputs = CastInputs::kRoot;
  // Casts inputs in fp16 and bf16 to fp32 instead, for a unit in full precision
  // that follows one in low precision. Not with a param_dtype other than fp32.
  bool force_input_to_fp32 = false;
  // Leaves shards' gradients in the reduce dtype.
  bool keep_low_precision_grads = false;
  // Casts nothing while the model is in eval mode.
  bool full_precision_in_eval = false;
  // Chooses modules whose own parameters and buffers keep their dtype inside a
  // unit that computes in another; LibTorch's normalisation layers take inputs
  // in a lower one. If unset, batch normalisation.
  std::function<bool(const torch::nn::Module&)> keep_full_precision;

  // InvalidArgument: a dtype is not float, double, half or bfloat16, or options
  // contradict each other.
  absl::Status Validate() const;

  // These return the dtypes for parameters stored in `stored`. Bytes stay
  // bytes.
  c10::ScalarType ParamDtype(c10::ScalarType stored) const {
    return c10::isFloatingType(stored) ? param_dtype.value_or(stored) : stored;
  }
  c10::ScalarType ReduceDtype(c10::ScalarType stored) const {
    return c10::isFloatingType(stored)
               ? reduce_dtype.value_or(ParamDtype(stored))
               : stored;
  }
  // Returns whether `keep_full_precision`, or its default, chooses the module.
  bool Keeps(const torch::nn::Module& module) const;

  // Returns "param BFloat16, reduce Float, inputs cast at the root".
  std::string ToString() const;
};

// Returns the options to compute in `dtype` and reduce in fp32.
MixedPrecision ComputeIn(c10::ScalarType dtype);

// These are for MixedPrecision::keep_full_precision. The first chooses batch
// normalisation of any dimension, the second also layer, group and instance
// normalisation.
bool IsBatchNorm(const torch::nn::Module& module);
bool IsNormalization(const torch::nn::Module& module);

// Quantises all-gathers of parameters for forward and backward, and
// reduce-scatters of gradients, as comm/quantized/quantized_communicator.h
// does. It applies to units that are sharded over more than one rank. All ranks
// compute with the same bits. These stay exact: shards, and so optimizers,
// state dicts and full parameters; the smaller gathers of backward
// (UnitOptions::backward_group_size), so that it computes with what forward
// had; all-reduces over replicate groups, of kNoShard and of norms; and which
// parameters were used.
//
// All fields but the log are the same on all ranks.
struct Quantization {
  // Quantises parameters. Units are gathered even if Options::share_memory
  // would spare it, so that results do not depend on where ranks are.
  bool gather = false;
  // Quantises gradients, unless a hook of the user reduces them.
  bool reduce = false;
  int64_t block = 256;    // numbers that share a scale
  int64_t min_bytes = 0;  // whole flat parameters and buffers below are exact
  // If not null, `gather` sends its form of the parameters instead of int8
  // blocks, for example float8 (comm/quantized/quantization_log.h), and `block`
  // and `min_bytes` apply to sums alone. Each rank has its own object.
  std::shared_ptr<comm::GatherExtension> gather_extension = nullptr;
  // Records what each collective of this rank loses, for which the host waits
  // for the device. It outlives the model.
  comm::QuantizationLog* log = nullptr;

  bool any() const { return gather || reduce; }  // whether anything is
  // InvalidArgument: a number is out of range, or there is an extension without
  // `gather`.
  absl::Status Validate() const;
  // The options of a group's communicator. The last `exact_tail` elements of
  // each rank's part of a sum are exact.
  comm::QuantizationOptions ForGroup(int64_t exact_tail) const;
  // Returns "gathers, sums in blocks of 256 from 0 bytes on", with the text of
  // an extension, or an empty string if nothing is quantised.
  std::string ToString() const;
};

// Policies that choose the modules of a model that become units.

// A module that a policy may choose.
struct WrapCandidate {
  const std::string& path;          // "blocks.0"
  const torch::nn::Module& module;  // lives as long as the call
  // Elements of the parameters below the module that no unit inside it owns.
  int64_t unowned_numel;
  // The module is a unit. It is false for Options::wrap_policy, which decides
  // that.
  bool is_unit = false;
};

// Returns whether the module is chosen, with the same answer on all ranks. It
// is called for every module but the root, children before their parents, and
// never for ModuleList and ModuleDict, which have no forward.
using WrapPolicy = std::function<bool(const WrapCandidate&)>;

// Chooses modules of these types, for example WrapModules<BlockImpl>().
template <typename... Modules>
WrapPolicy WrapModules() {
  static_assert(
      (!std::is_base_of_v<torch::detail::ModuleHolderIndicator, Modules> &&
       ...),
      "WrapModules<Block>(), where Block is what TORCH_MODULE(Block) declares, "
      "a holder, would find no module: write WrapModules<BlockImpl>()");
  return [](const WrapCandidate& candidate) {
    return ((dynamic_cast<const Modules*>(&candidate.module) != nullptr) ||
            ...);
  };
}

// Chooses modules with at least `min_numel` elements that no unit inside them
// owns, as fairscale's default_auto_wrap_policy does.
WrapPolicy WrapLargerThan(int64_t min_numel);

// Chooses every unit but the root, for Options::recompute.units.
WrapPolicy EveryUnit();

// Chooses modules that either of the two chooses.
WrapPolicy WrapAny(WrapPolicy first, WrapPolicy second);

class ActivationOffload;

// How an activation checkpoint runs its function again in backward.
struct CheckpointOptions {
  // The second run draws the same random numbers from the default generators of
  // the CPU and of the devices of tensor arguments. Costs a copy of the
  // generators' states per region.
  bool preserve_rng_state = true;

  // After the second run buffers have the values that they had before it, so
  // that BatchNorm counts a batch once. This applies to the buffers of the
  // sharded model whose units run around or inside the region, and to those of
  // `modules`: name there what else the function changes. Costs a copy of the
  // buffers during the second run.
  bool restore_buffers = true;
  std::vector<std::shared_ptr<torch::nn::Module>> modules = {};

  // Keeps arguments between forward and backward (see activation_offload.h). If
  // null, they stay in memory. All regions of a rank share one. A graph keeps
  // it alive.
  std::shared_ptr<ActivationOffload> offload;
};

// Selects what is sharded, and for how long parameters are whole. The number of
// gathers is for n units and one optimizer step of k backwards, all but the
// last under NoSync.
enum class ShardingStrategy {
  kFullShard,       // ZeRO-3: whole while the unit computes; k*(2n-1) gathers
  kShardGradOp,     // ZeRO-2: whole from forward to backward; k*n gathers
  kShardOptimizer,  // ZeRO-1: whole until the backward that synchronises, as
                    // gradients are under NoSync; n gathers
  kNoShard,         // DDP: always whole; gradients are all-reduced
  // These shard in a row of the mesh and replicate across rows. Gradients are
  // reduce-scattered in the row and all-reduced across rows.
  kHybridShard,        // as kFullShard in the row
  kHybridShardGradOp,  // as kShardGradOp in the row
};

// Returns a text such as "full shard".
const char* ToString(ShardingStrategy strategy);

// Options that may differ between units.
struct UnitOptions {
  // Selects what of the unit is sharded, and for how long it is whole.
  ShardingStrategy strategy = ShardingStrategy::kFullShard;
  // With a strategy that frees parameters after forward, a rank keeps so much
  // of them until backward that this many consecutive ranks of the row can
  // gather among themselves. It divides the row. If unset, a rank keeps its
  // shard only.
  std::optional<int> backward_group_size = std::nullopt;
  MixedPrecision precision;  // the dtypes of the unit
};

// Chooses units whose forward is run again in backward, so that activations are
// not kept: each call works as fsdp::CheckpointWith() (see checkpoint.h) with
// these options, and finds the buffers of the unit's modules by itself.
struct RecomputeOptions {
  // Called as `wrap_policy` is, after it. It has to choose at least one module,
  // and only units. With `transparent` those have to be called by
  // fsdp::Forward() or to be children of a Sequential; the first forward
  // refuses others.
  WrapPolicy units;
  CheckpointOptions options;  // of each call
};

// Chooses modules, with everything below them, and parameters by name that stay
// as they are: they are neither sharded nor broadcast nor reduced.
struct IgnoreOptions {
  // These return true for what stays as it is; null: nothing does.
  std::function<bool(const std::string& path, const torch::nn::Module& module)>
      module;
  std::function<bool(const std::string& name, const at::Tensor& parameter)>
      parameter;
};

// Starts the next unit's all-gather while a unit computes.
struct PrefetchOptions {
  bool forward = true;   // in the order of the last forward
  bool backward = true;  // in the reverse order of this forward
};

// The values that training starts from.
struct InitOptions {
  // All ranks start from rank 0's parameters and buffers. If false, every rank
  // keeps its own, which is right only if all have the same.
  bool broadcast = true;

  // Called for each module whose own parameters or buffers are deferred (see
  // deferred_init.h), when its unit is sharded, to give them other values than
  // the constructor does, for example from a file. The module's own tensors
  // have memory by then; those of modules inside may not. The default generator
  // is seeded by `seed` and the path. With `broadcast` only rank 0 calls it. If
  // it fails, sharding returns its error.
  std::function<absl::Status(const std::string& path,
                             torch::nn::Module& module)>
      module;
  uint64_t seed = 0;  // for `module`

  // Chooses parameters, by the names of Ranges(), that the program loads
  // before it uses them, for example from files: they are neither drawn nor
  // broadcast. Until then a forward, a state dict or a save is refused, with
  // the name of a parameter that was not loaded. May be null.
  std::function<bool(const std::string& name)> loaded_later;
};

// The factors by which sums of gradients are divided. Both are positive.
struct GradientOptions {
  // If unset, the number of ranks; 1 makes gradients sums.
  std::optional<double> divide_factor = std::nullopt;
  // The part of divide_factor that is applied before the reduction; the rest
  // comes after it. If unset, all comes after it, or before it where the
  // communicator adds scaled inputs faster (Communicator::PrefersScaledInputs),
  // and for fp16 about half each.
  std::optional<double> predivide_factor = std::nullopt;
};

// Selects checks that find mistakes of the program.
struct ModelChecks {
  // Compares the order of collectives between ranks at the end of every
  // backward that reduces, by an all-reduce of 16 bytes.
  bool order = true;

  // Refuses a model if something besides it refers to all of its trainable
  // parameters: usually an optimizer, which would go on without training
  // anything.
  bool outside_references = true;
};

// Options of FullyShard(), the same on all ranks; by default ZeRO stage 3.
struct Options {
  // Chooses the units besides the root, which owns what no other unit does.
  // Without a policy the whole model is one unit, and no memory is saved while
  // it computes.
  WrapPolicy wrap_policy;

  // The options of all units. `configure_unit` may change them for the root and
  // for each module that `wrap_policy` has chosen.
  UnitOptions unit;
  std::function<void(const std::string& path, const torch::nn::Module& module,
                     UnitOptions& unit)>
      configure_unit;

  RecomputeOptions recompute;  // units that are computed twice
  IgnoreOptions ignore;        // modules and parameters that stay as they are
  PrefetchOptions prefetch;    // gathers ahead of use
  InitOptions init;            // the values that training starts from
  GradientOptions gradients;   // what sums of gradients are divided by
  ModelChecks checks;          // for mistakes of the program

  // Frees the root's parameters after forward, too, if its strategy frees those
  // of units. By default they stay, since backward begins with the root.
  bool reshard_root_after_forward = false;

  // Finds out from the operators that run when a unit's forward and backward
  // begin and end, so that parents may call their children directly. Costs up
  // to a microsecond per operator.
  bool transparent = false;

  // Aborts the communicator when a forward or Backward() fails half-way, so
  // that the peers end at once instead of waiting. Set it to false if all ranks
  // fail alike and go on, for example with an input that all refuse.
  bool abort_on_failure = true;

  // Rank 0 writes the tree of units and the memory plan to stderr.
  bool verbose = false;

  // If the ranks of a group share a host's memory, all compute with one copy of
  // the parameters. Shards in the compute dtype lie side by side and are never
  // copied; of other parameters there is one copy in the compute dtype, to
  // which each rank writes its part once a step. Shards may then be written
  // between steps only, as optimizers do.
  bool share_memory = true;

  // Makes gathers of parameters and sums of gradients send int8.
  Quantization quantize;

  // Selects where shards, gradients and optimizer states rest between uses.
  OffloadOptions offload;

  // Longest wait for a collective. Positive; if unset, the communicator's
  // default.
  std::optional<absl::Duration> timeout = std::nullopt;
};

}  // namespace fsdp

#endif  // FSDP_OPTIONS_OPTIONS_H_
