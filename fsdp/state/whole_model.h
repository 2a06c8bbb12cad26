// A sharded model as a whole, between steps. Full parameters: in a scope, one
// after the other, or gathered ahead of use, as summon_full_params of fairscale
// and PyTorch FSDP. State dicts: the values, and the state of a LibTorch
// optimizer over its Parameters(), by name, in memory, whole or as ranges.
#ifndef FSDP_STATE_WHOLE_MODEL_H_
#define FSDP_STATE_WHOLE_MODEL_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ranges/tensor_range.h"

namespace fsdp {

class ShardedModel;

// --- Full parameters ---------------------------------------------------------
// Options of a scope of full parameters, the same on all ranks.
struct SummonOptions {
  // Includes the units inside the module; otherwise only the parameters that
  // the module owns as a unit.
  bool recurse = true;
  // Keeps what is written inside the scope: each rank's own range, or with
  // rank0_only everything that rank 0 has written. If false, writes are lost,
  // except to units that are not sharded.
  bool writeback = true;
  // Only rank 0 gets values; on the others the parameters stay empty.
  bool rank0_only = false;
  bool offload_to_cpu = false;  // full parameters are on the CPU
  // The parameters have their gradients, which are written back as well.
  bool with_grads = false;
};

// While the scope lives, the module's parameters are ordinary leaves under
// their own names, with values in full precision in memory of their own.
// Forward, backward and another such scope are refused. When the scope ends,
// its tensors lose their values: clone what has to outlive it. All ranks open
// and close it together. It must not outlive the module; a moved-from scope is
// closed.
class FullParamsScope {
 public:
  FullParamsScope(FullParamsScope&&) noexcept;
  FullParamsScope& operator=(FullParamsScope&&) noexcept;
  // Calls Close(), and warns of its error.
  ~FullParamsScope();

  // Writes back and shards again, also after an exception in the scope. Data
  // that has replaced a parameter's is taken: InvalidArgument on all ranks,
  // with nothing written, if it has other sizes on one. A second call does
  // nothing.
  absl::Status Close();

 private:
  friend absl::StatusOr<FullParamsScope> SummonFullParams(
      torch::nn::Module& module, const SummonOptions& options);
  class Impl;
  explicit FullParamsScope(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

// Opens a scope for `module`: a sharded module, one inside it, or one with
// sharded ones inside. If nothing in it is sharded, this does nothing.
// Collective. Errors are the same on all ranks. FailedPrecondition: inside a
// forward, a backward or another such scope. InvalidArgument: options differ
// between ranks.
absl::StatusOr<FullParamsScope> SummonFullParams(
    torch::nn::Module& module, const SummonOptions& options = SummonOptions());

// Gets the full value of a parameter in full precision, valid during the call.
using FullParameterVisitor =
    std::function<absl::Status(const std::string& name, const at::Tensor&)>;

// Options of ForEachFullParameter(), the same on all ranks.
struct VisitOptions {
  // These are as in SummonOptions. Without writeback the visitor's writes are
  // lost.
  bool writeback = false;
  bool rank0_only = false;
};

// Implements the member of a sharded module. It holds one unit at a time, so
// that a model larger than memory can be read and edited. Collective. If the
// visitor of one rank fails, all ranks return an error, and what follows is not
// written back, nor the rest of its flat parameter.
absl::Status ForEachFullParameter(ShardedModel& model,
                                  const FullParameterVisitor& visit,
                                  const VisitOptions& options = VisitOptions());

// A unit that is gathered ahead of its forward, as PyTorch's UnshardHandle. If
// the unit was used or freed, Wait() gathers it again until the next forward.
class UnshardHandle {
 public:
  UnshardHandle(std::shared_ptr<ShardedModel> model, int unit)
      : model_(std::move(model)), unit_(unit) {}

  // Returns when the parameters are there.
  absl::Status Wait();

 private:
  std::shared_ptr<ShardedModel> model_;
  int unit_;
};

// Starts to gather the unit that `module` is, without the units inside it. Its
// next forward finds it gathered. All ranks make the same call.
// FailedPrecondition: `module` is no unit.
//
// Between steps the unit gets the present values, in memory of its own, and
// keeps them until it is used or freed. Writes to shards after this call do not
// reach it, not even before Wait() or with a second call. A forward with grad
// refuses a unit whose shards were written meanwhile, since backward would
// gather other values: call Reshard() after the optimizer's step. Inside a
// forward or backward, where shards do not change, this is a prefetch that ends
// with it. A unit that is not sharded and computes in the dtype of its storage
// is its own shard, and shows writes to it.
absl::StatusOr<UnshardHandle> Unshard(torch::nn::Module& module);
// Frees the unit. FailedPrecondition: `module` is no unit, or it computes.
absl::Status Reshard(torch::nn::Module& module);

// One flat parameter of a unit, whole.
struct RebuiltParameter {
  std::string unit;  // "blocks.3"
  at::Tensor flat;   // 1-D, with padding
  // Resharding gives its memory back. This is false for a unit that is not
  // sharded, rests on its device and computes in the dtype of its storage.
  bool safe_to_free;
};

// Implements the member of a sharded module, fairscale's _rebuild_full_params.
// It gathers all units in the dtypes they compute in and returns their flat
// parameters, valid until Reshard() or the next forward frees the units.
// Collective.
absl::StatusOr<std::vector<RebuiltParameter>> RebuildFullParams(
    ShardedModel& model);

// --- State dicts -------------------------------------------------------------
// Has parameters and then buffers, under every name that the unwrapped module
// has for them. Tied parameters share a tensor.
using StateDict = torch::OrderedDict<std::string, at::Tensor>;

// Options of gathering, the same on all ranks.
struct StateDictOptions {
  // The other ranks take part, but get an empty dict.
  bool rank0_only = false;
  bool offload_to_cpu = false;  // each tensor, as soon as it is whole
};

// Options of LoadStateDict(), the same on all ranks.
struct LoadOptions {
  // Refuses names that are missing or unexpected. Shapes have to fit anyway.
  bool strict = true;
  // Only rank 0 passes a dict. Unimplemented: a buffer is sparse.
  bool rank0_only = false;
};

// Users call the members of a sharded module with the names of these functions.
// `module` is the wrapped module of `model`.

// --- State dicts, whole ------------------------------------------------------
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

// --- State dicts, as ranges --------------------------------------------------
// One rank's part of a state dict.
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
// nothing changed, lists gaps, shapes that differ, and names that the model
// lacks.
absl::Status LoadShardedStateDict(ShardedModel& model,
                                  const torch::nn::Module& module,
                                  absl::Span<const TensorRange> pieces,
                                  const StateDict& others);

// --- State of optimizers -----------------------------------------------------
// These functions know SGD, Adam, AdamW, Adagrad and RMSprop of torch::optim.

// A parameter group of an optimizer.
struct OptimizerGroup {
  std::vector<std::string> names;  // of parameters
  // Those of the optimizer's class, such as torch::optim::AdamWOptions.
  std::shared_ptr<const torch::optim::OptimizerOptions> options;
};

// The state of an optimizer. Tensors are named "weight.exp_avg", and numbers
// "weight.step". A parameter that has never been stepped has neither.
struct OptimizerStateDict {
  StateDict tensors;                       // whole, of their parameters' shapes
  std::map<std::string, int64_t> numbers;  // by these names, too
  std::vector<OptimizerGroup> groups;      // in the optimizer's order
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
  std::vector<TensorRange> tensors;  // this rank's
  // These are as in OptimizerStateDict.
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

#endif  // FSDP_STATE_WHOLE_MODEL_H_
