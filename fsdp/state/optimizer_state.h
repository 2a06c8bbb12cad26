// Gathers and loads the state of a LibTorch optimizer over a sharded model's
// Parameters(), by parameter name, in memory: whole or as ranges.
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
#include "fsdp/state/optimizer_values.h"
#include "fsdp/state/state_dict.h"
#include "ranges/tensor_range.h"

namespace fsdp {

class ShardedModel;

// These functions know SGD, Adam, AdamW, Adagrad and RMSprop of torch::optim.
// Users call the members of a sharded module with the same names.

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

#endif  // FSDP_STATE_OPTIMIZER_STATE_H_
