// Gathers and loads a sharded model's values, and the state of a LibTorch
// optimizer over its Parameters(), by name, in memory: whole, or as ranges.
#ifndef FSDP_STATE_STATE_DICT_H_
#define FSDP_STATE_STATE_DICT_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ranges/tensor_range.h"

namespace fsdp {

class ShardedModel;

// Has parameters and then buffers, under every name that the unwrapped module
// has for them. Tied parameters share a tensor.
using StateDict = torch::OrderedDict<std::string, at::Tensor>;

struct StateDictOptions {
  // The other ranks take part, but get an empty dict.
  bool rank0_only = false;
  bool offload_to_cpu = false;
};

struct LoadOptions {
  // Refuses names that are missing or unexpected. Shapes have to fit anyway.
  bool strict = true;
  // Only rank 0 passes a dict. Unimplemented: a buffer is sparse.
  bool rank0_only = false;
};

// Users call the members of a sharded module with the names of these functions.
// `module` is the wrapped module of `model`.

// --- Whole -------------------------------------------------------------------
// Returns copies in the dtypes that parameters and buffers were made with,
// gathered one unit at a time. Collective. FailedPrecondition on all ranks:
// inside a forward, a backward or a scope of full parameters, or a parameter
// has no values (InitOptions::loaded_later).
absl::StatusOr<StateDict> GatherStateDict(
    ShardedModel& model, const torch::nn::Module& module,
    const StateDictOptions& options = StateDictOptions());

// Copies each rank's ranges into its shards. Collective. InvalidArgument on all
// ranks, with nothing changed, lists the names that are missing or unexpected,
// and values whose shape differs or whose dtype cannot be converted.
absl::Status LoadStateDict(ShardedModel& model, const torch::nn::Module& module,
                           const StateDict& dict,
                           const LoadOptions& options = LoadOptions());

// --- Ranges ------------------------------------------------------------------
struct ShardedStateDict {
  std::vector<TensorRange> parameters;  // this rank's
  StateDict others;                     // buffers and what is not sharded
};

// Returns copies of this rank's values. Collective, but no values are sent.
absl::StatusOr<ShardedStateDict> MakeShardedStateDict(
    ShardedModel& model, const torch::nn::Module& module);

// Loads from the pieces of any number of ranks: each rank passes those that
// cover its own ranges, or all. Pieces may overlap if they are equal, as copies
// of replicated units are. Collective. InvalidArgument on all ranks, with
// nothing changed, lists gaps and shapes that differ.
absl::Status LoadShardedStateDict(ShardedModel& model,
                                  const torch::nn::Module& module,
                                  absl::Span<const TensorRange> pieces,
                                  const StateDict& others);

// --- Optimizers --------------------------------------------------------------
// These functions know SGD, Adam, AdamW, Adagrad and RMSprop of torch::optim.

struct OptimizerGroup {
  std::vector<std::string> names;  // of parameters
  std::shared_ptr<const torch::optim::OptimizerOptions> options;
};

// Tensors are named "weight.exp_avg", and numbers "weight.step". A parameter
// that has never been stepped has neither.
struct OptimizerStateDict {
  StateDict tensors;  // whole, of their parameters' shapes
  std::map<std::string, int64_t> numbers;
  std::vector<OptimizerGroup> groups;
};

// Gathers the state, one flat parameter at a time. Collective. With rank0_only
// the other ranks get an empty dict. InvalidArgument on all ranks: the
// optimizer is of another kind or has a parameter that is no shard of `model`,
// or states differ between ranks. FailedPrecondition: as GatherStateDict().
absl::StatusOr<OptimizerStateDict> GatherOptimizerState(
    ShardedModel& model, torch::optim::Optimizer& optimizer,
    const StateDictOptions& options = StateDictOptions());

// Replaces state and options of `optimizer`. Parameters without a state in
// `dict` have none afterwards. All ranks pass the whole dict, gathered from any
// number of ranks. Collective. InvalidArgument on all ranks, with nothing
// changed: something does not fit, which the text tells.
absl::Status LoadOptimizerState(ShardedModel& model,
                                torch::optim::Optimizer& optimizer,
                                const OptimizerStateDict& dict);

// This rank's part of the state. Ranges are named as tensors of the dict are.
struct ShardedOptimizerState {
  std::vector<TensorRange> tensors;
  std::map<std::string, int64_t> numbers;
  std::vector<OptimizerGroup> groups;
};

// Copies this rank's part. Collective, but no tensors are sent. Errors are
// those of GatherOptimizerState().
absl::StatusOr<ShardedOptimizerState> MakeShardedOptimizerState(
    ShardedModel& model, torch::optim::Optimizer& optimizer);

// Does what LoadOptimizerState() does, from the pieces of any number of ranks,
// with the `numbers` and `groups` of any of them.
absl::Status LoadShardedOptimizerState(
    ShardedModel& model, torch::optim::Optimizer& optimizer,
    absl::Span<const TensorRange> tensors,
    const std::map<std::string, int64_t>& numbers,
    const std::vector<OptimizerGroup>& groups);

}  // namespace fsdp

#endif  // FSDP_STATE_STATE_DICT_H_
