// The state of a LibTorch optimizer over a sharded model's Parameters(), by
// parameter name, in memory: whole or in pieces.
#ifndef FSDP_STATE_OPTIMIZER_STATE_H_
#define FSDP_STATE_OPTIMIZER_STATE_H_

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "fsdp/state/model_values.h"
#include "fsdp/state/optimizer_values.h"
#include "fsdp/state/state_dict.h"

namespace fsdp {

class ShardedModel;

// Knows SGD, Adam, AdamW, Adagrad and RMSprop of torch::optim. Users call the
// members of a sharded module with the names of these functions.

// Tensors are named "weight.exp_avg", numbers "weight.step". A parameter that
// has never been stepped has neither.
struct OptimizerStateDict {
  StateDict tensors;  // whole, of their parameters' shapes
  std::map<std::string, int64_t> numbers;
  std::vector<OptimizerGroup> groups;
};

// Collective; gathers one flat parameter at a time. With rank0_only the other
// ranks get an empty one. InvalidArgument on all ranks: another optimizer, or
// one that is not over exactly shards of `model`; states that differ between
// ranks. FailedPrecondition as GatherStateDict().
absl::StatusOr<OptimizerStateDict> GatherOptimizerState(
    ShardedModel& model, torch::optim::Optimizer& optimizer,
    const StateDictOptions& options = StateDictOptions());

// Replaces state and options of `optimizer`; what `dict` has no state of has
// none afterwards. All ranks pass the whole dict, of any number of ranks.
// Collective. InvalidArgument on all ranks, with nothing changed, lists what
// does not fit.
absl::Status LoadOptimizerState(ShardedModel& model,
                                torch::optim::Optimizer& optimizer,
                                const OptimizerStateDict& dict);

// This rank's part: `tensors` in pieces instead, each named as above.
struct ShardedOptimizerState {
  std::vector<ParameterPiece> tensors;
  std::map<std::string, int64_t> numbers;
  std::vector<OptimizerGroup> groups;
};

// Copies; no tensor travels. Errors as above.
absl::StatusOr<ShardedOptimizerState> MakeShardedOptimizerState(
    ShardedModel& model, torch::optim::Optimizer& optimizer);

// From the pieces of any number of ranks; `numbers` and `groups` as any of them
// has them. As LoadOptimizerState().
absl::Status LoadShardedOptimizerState(
    ShardedModel& model, torch::optim::Optimizer& optimizer,
    absl::Span<const ParameterPiece> tensors,
    const std::map<std::string, int64_t>& numbers,
    const std::vector<OptimizerGroup>& groups);

}  // namespace fsdp

#endif  // FSDP_STATE_OPTIMIZER_STATE_H_
