// Reads and replaces states of LibTorch's optimizers, of any class, as tensors
// and numbers by the names of parameters. Nothing is copied or sent.
#ifndef FSDP_STATE_OPTIMIZER_VALUES_H_
#define FSDP_STATE_OPTIMIZER_VALUES_H_

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "fsdp/state/whole_model.h"
#include "ranges/tensor_range.h"

namespace fsdp {

// The state of one parameter: {"exp_avg", "exp_avg_sq"} and {"step"} for Adam.
struct OptimizerSlots {
  std::map<std::string, at::Tensor> tensors;  // defined ones only
  std::map<std::string, int64_t> numbers;
};

struct OptimizerValues {
  std::map<std::string, OptimizerSlots> slots;  // of parameters with state
  std::vector<OptimizerGroup> groups;
};

// Reads what `optimizer` holds. `leaves` are the shards of a sharded model with
// their names, which it may step. Tensors of slots are of their leaf's size,
// and may rest off the device. InvalidArgument: the optimizer is not known, or
// has a parameter that is not among `leaves`.
absl::StatusOr<OptimizerValues> ReadOptimizerValues(
    absl::Span<const TensorRange> leaves, torch::optim::Optimizer& optimizer);

// Returns the tensors of each slot, by its name, as ranges of the `leaves` that
// have it.
std::map<std::string, std::vector<TensorRange>> SlotRanges(
    absl::Span<const TensorRange> leaves, const OptimizerValues& values);

// New states and options for an optimizer, in place of those it has.
struct OptimizerReplacement {
  std::vector<
      std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>>
      states;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
};

// Plans to replace `present`, which `optimizer` holds, by `slots`, by
// parameter, and the options of `groups`. InvalidArgument: the groups, or the
// class of the optimizer or of states, are others; or Adagrad steps a parameter
// without a state. If not `strict`, groups may differ: each group of the
// optimizer gets the options of the group with which it has most names in
// common, else of the group in its place if there are as many, else it keeps
// its own; states of parameters in no group are left out.
absl::StatusOr<OptimizerReplacement> PlanReplacement(
    absl::Span<const TensorRange> leaves,
    const torch::optim::Optimizer& optimizer, const OptimizerValues& present,
    const std::map<std::string, OptimizerSlots>& slots,
    const std::vector<OptimizerGroup>& groups, bool strict = true);
// Carries out a plan. The caller then calls TakeUpStates().
void Apply(OptimizerReplacement replacement,
           torch::optim::Optimizer& optimizer);

// Does a part of Apply(), for states that are not all in memory at a time: sets
// the options, and erases states without a replacement. The caller then calls
// ApplyState() for each parameter with a state, and TakeUpStates().
void ApplyOptions(const OptimizerReplacement& replacement,
                  torch::optim::Optimizer& optimizer);
absl::Status ApplyState(const at::Tensor& leaf, const OptimizerSlots& slots,
                        torch::optim::Optimizer& optimizer);

// Moves states to where they rest, if the optimizer is a RestingStates.
absl::Status TakeUpStates(torch::optim::Optimizer& optimizer);
// Does the same for the states of `leaves` alone.
absl::Status TakeUpStates(torch::optim::Optimizer& optimizer,
                          absl::Span<const at::Tensor> leaves);

}  // namespace fsdp

#endif  // FSDP_STATE_OPTIMIZER_VALUES_H_
