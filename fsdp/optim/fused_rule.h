// What an optimizer tells so that FusedStepper steps it.
#ifndef FSDP_OPTIM_FUSED_RULE_H_
#define FSDP_OPTIM_FUSED_RULE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/flat_hash_map.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "fsdp/optim/fused_runs.h"

namespace fsdp {

// Arguments of a kernel, an entry per run.
struct FusedLists {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;
  std::array<std::vector<at::Tensor>, kMaxFusedSlots> slots;
  std::vector<at::Tensor> steps;  // numbers in float, from 1 on
};

// States and options are of the optimizer's own classes.
class FusedRule {
 public:
  using Slots = std::array<at::Tensor*, kMaxFusedSlots>;

  virtual ~FusedRule() = default;

  // The dtype that the kernel has to be given for parameters of `dtype`: the
  // same unless it cannot take that.
  virtual at::ScalarType KernelDtype(at::ScalarType dtype,
                                     at::Device device) const = 0;
  // How many tensors of a state the kernel takes. Without any, no states.
  virtual int NumSlots(const torch::optim::OptimizerOptions& options) const = 0;
  virtual std::unique_ptr<torch::optim::OptimizerParamState> NewState()
      const = 0;
  // The tensors of a state; null where it has no more.
  virtual Slots SlotsOf(torch::optim::OptimizerParamState& state) const = 0;
  // The number of the step that comes: 1 after NewState().
  virtual int64_t NextStep(torch::optim::OptimizerParamState& state) const = 0;
  virtual void SetStep(torch::optim::OptimizerParamState& state,
                       int64_t step) const = 0;
  // `first`: the step of all runs is 1; otherwise that of none is. `rate`: one
  // element in float, in place of the options' learning rate; undefined: that.
  virtual void Call(const FusedLists& lists,
                    const torch::optim::OptimizerOptions& options, bool first,
                    const at::Tensor& rate) const = 0;
  // Whether nothing but learning rates differs.
  virtual bool SameButRates(const torch::optim::OptimizerOptions& a,
                            const torch::optim::OptimizerOptions& b) const = 0;
};

using OptimizerStates =
    ska::flat_hash_map<void*,
                       std::unique_ptr<torch::optim::OptimizerParamState>>;

}  // namespace fsdp

#endif  // FSDP_OPTIM_FUSED_RULE_H_
