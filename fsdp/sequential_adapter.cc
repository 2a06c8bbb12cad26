#include "fsdp/sequential_adapter.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include <memory>
#include <utility>

#include "fsdp/forward.h"
#include "fsdp/unit_handle.h"

namespace fsdp {
namespace {

// Stands in a Sequential's list for a child that is a unit.
class UnitCaller final : public torch::nn::Module {
 public:
  explicit UnitCaller(torch::nn::AnyModule child)
      : torch::nn::Module("fsdp::UnitCaller"), child_(std::move(child)) {
    // So that who takes it from the list finds the unit, and those inside. The
    // Sequential's own children are the modules themselves.
    register_module("child", child_.ptr());
    register_module(kUnitHandleName, FindUnit(*child_.ptr()));
  }

  at::Tensor forward(at::Tensor input) {
    ForwardScope scope(*child_.ptr());
    if (scope.casts_inputs()) scope.CastInputs({&input});
    if (scope.watches_inputs()) scope.WatchInput(input);
    at::Tensor output = child_.forward(std::move(input));
    scope.Finish({&output});
    return output;
  }

 private:
  torch::nn::AnyModule child_;
};

}  // namespace

void AdaptSequential(torch::nn::SequentialImpl& sequential) {
  for (torch::nn::AnyModule& child : sequential) {
    if (FindUnit(*child.ptr()) == nullptr) continue;
    child =
        torch::nn::AnyModule(std::make_shared<UnitCaller>(std::move(child)));
  }
}

}  // namespace fsdp
