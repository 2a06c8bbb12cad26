// LibTorch's optimizer states, whatever their class, as named tensors and
// numbers.
#ifndef FSDP_STATE_OPTIMIZER_SLOTS_H_
#define FSDP_STATE_OPTIMIZER_SLOTS_H_

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

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

}  // namespace fsdp

#endif  // FSDP_STATE_OPTIMIZER_SLOTS_H_
