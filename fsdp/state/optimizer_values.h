// What a LibTorch optimizer holds, by the names of its parameters, where it is:
// nothing is copied and nothing travels.
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
#include "fsdp/model/named_shard.h"

// LibTorch's optimizer states, whatever their class, as named tensors and
// numbers.

namespace fsdp {

// Of one parameter: {"exp_avg", "exp_avg_sq"} and {"step"} for Adam.
struct OptimizerSlots {
  std::map<std::string, at::Tensor> tensors;  // defined ones only
  std::map<std::string, int64_t> numbers;
};

// InvalidArgument: a class that is not known; see optimizer_state.h.
absl::StatusOr<OptimizerSlots> ReadSlots(
    const torch::optim::OptimizerParamState& state);

// A state of the class that `optimizer` uses. InvalidArgument: an optimizer
// that is not known, or slots that its states do not have.
absl::StatusOr<std::unique_ptr<torch::optim::OptimizerParamState>> MakeState(
    const torch::optim::Optimizer& optimizer, const OptimizerSlots& slots);

struct OptimizerGroup {
  std::vector<std::string> names;  // of parameters
  std::shared_ptr<const torch::optim::OptimizerOptions> options;
};

struct OptimizerValues {
  std::map<std::string, OptimizerSlots> slots;  // of parameters with state
  std::vector<OptimizerGroup> groups;
};

// `leaves`: what the optimizer may step, with their names: the shards of a
// sharded model. Slots' tensors are of their leaf's size, and may rest
// elsewhere. InvalidArgument: an optimizer that is not known, or one with a
// parameter that is not among `leaves`.
absl::StatusOr<OptimizerValues> ReadOptimizerValues(
    absl::Span<const NamedShard> leaves, torch::optim::Optimizer& optimizer);

// New states and options for an optimizer, in place of those it has.
struct OptimizerReplacement {
  std::vector<
      std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>>
      states;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
};

// Of `slots`, by parameter, and `groups`; `present`: what `optimizer` holds.
// InvalidArgument: other groups, or another class of optimizer or of states.
// Not `strict`: groups may be others; each of the optimizer gets the options of
// that with which it has most names in common, then of that in its place if
// there are as many, or keeps its own; and states of what is in none are left
// out.
absl::StatusOr<OptimizerReplacement> PlanReplacement(
    absl::Span<const NamedShard> leaves,
    const torch::optim::Optimizer& optimizer, const OptimizerValues& present,
    const std::map<std::string, OptimizerSlots>& slots,
    const std::vector<OptimizerGroup>& groups, bool strict = true);
// TakeUpStates() has to follow.
void Apply(OptimizerReplacement replacement,
           torch::optim::Optimizer& optimizer);

// Apply() in parts, for states that are not all in memory at a time: the
// options, and the end of states that none takes the place of. ApplyState() of
// each parameter that has one, and TakeUpStates(), have to follow.
void ApplyOptions(const OptimizerReplacement& replacement,
                  torch::optim::Optimizer& optimizer);
absl::Status ApplyState(const at::Tensor& leaf, const OptimizerSlots& slots,
                        torch::optim::Optimizer& optimizer);

// Moves states to where they rest, for an optimizer whose states do.
absl::Status TakeUpStates(torch::optim::Optimizer& optimizer);
// The same of those of `leaves` alone.
absl::Status TakeUpStates(torch::optim::Optimizer& optimizer,
                          absl::Span<const at::Tensor> leaves);

}  // namespace fsdp

#endif  // FSDP_STATE_OPTIMIZER_VALUES_H_
