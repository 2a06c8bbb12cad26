// A sharded model's values by name, in memory: whole, or as this rank's pieces.
#ifndef FSDP_STATE_STATE_DICT_H_
#define FSDP_STATE_STATE_DICT_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "fsdp/state/model_values.h"

namespace fsdp {

class ShardedModel;

// Parameters, then buffers, under every name the unwrapped module has for them;
// tied parameters share a tensor.
using StateDict = torch::OrderedDict<std::string, at::Tensor>;

struct StateDictOptions {
  // The other ranks take part and get an empty dict.
  bool rank0_only = false;
  bool offload_to_cpu = false;
};

struct LoadOptions {
  // Refuse names that are missing or unexpected. Shapes have to fit anyway.
  bool strict = true;
  // Only rank 0 passes a dict.
  bool rank0_only = false;
};

// Users call the members of a sharded module with these names; `module` is the
// wrapped one of `model`, here and below.

// --- Whole -------------------------------------------------------------------
// Copies in the dtypes that parameters and buffers were made with, gathered one
// unit at a time. Collective. FailedPrecondition on all ranks inside a forward,
// a backward or a scope of full parameters.
absl::StatusOr<StateDict> GatherStateDict(
    ShardedModel& model, const torch::nn::Module& module,
    const StateDictOptions& options = StateDictOptions());

// Each rank takes its ranges. Collective. InvalidArgument on all ranks, with
// nothing changed, lists everything that is missing, unexpected, of another
// shape, or not of floating point where it has to be.
absl::Status LoadStateDict(ShardedModel& model, const torch::nn::Module& module,
                           const StateDict& dict,
                           const LoadOptions& options = LoadOptions());

// --- Pieces ------------------------------------------------------------------
struct ShardedStateDict {
  std::vector<ParameterPiece> parameters;  // this rank's
  StateDict others;                        // buffers and what is not sharded
};

// Copies. Collective, but no values travel.
absl::StatusOr<ShardedStateDict> MakeShardedStateDict(
    ShardedModel& model, const torch::nn::Module& module);

// From the pieces of any number of ranks: every rank passes those that cover
// its own ranges, or all. Pieces may overlap where they are equal copies, of
// replicas. Collective. InvalidArgument on all ranks, with nothing changed,
// lists gaps and shapes that differ.
absl::Status LoadShardedStateDict(ShardedModel& model,
                                  const torch::nn::Module& module,
                                  absl::Span<const ParameterPiece> pieces,
                                  const StateDict& others);

}  // namespace fsdp

#endif  // FSDP_STATE_STATE_DICT_H_
