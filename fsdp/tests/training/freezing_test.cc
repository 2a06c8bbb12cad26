// Frozen parameters and units, and changes of what is trained between steps.
#include <ATen/ops/ones.h>

#include "fsdp/testing/gradient_check.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

// Like LoRA, has a frozen trunk below and above what is trained.
class FrozenEnds : public torch::nn::Module {
 public:
  FrozenEnds()
      : first(register_module("first", std::make_shared<UnitImpl>())),
        middle(register_module("middle", std::make_shared<UnitImpl>())),
        last(register_module("last", std::make_shared<UnitImpl>())) {
    for (const auto& unit : {first, last}) {
      for (at::Tensor& p : unit->parameters()) p.set_requires_grad(false);
    }
    middle->linear->bias.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    return Forward(last, Forward(middle, Forward(first, x).tanh()).tanh());
  }
  std::shared_ptr<UnitImpl> first, middle, last;
};

TEST(FreezingTest, FrozenUnitsAndFrozenParametersInATrainableUnit) {
  ExpectSameGradients<FrozenEnds>(Filled<FrozenEnds>, SquareLoss,
                                  UnitsOf<UnitImpl>());
}

TEST(FreezingTest, GradientsReachTheInputThroughFrozenUnits) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        auto model, FullyShard(Filled<FrozenEnds>(), Unowned(communicator),
                               UnitsOf<UnitImpl>()));
    auto plain = Filled<FrozenEnds>();
    const at::Tensor x = Rows(0, 2, kDim).requires_grad_();
    const at::Tensor y = Rows(0, 2, kDim).requires_grad_();
    plain->forward(y).square().mean().backward();
    FSDP_RETURN_IF_ERROR(model->Backward(model->forward(x).square().mean()));
    FSDP_RETURN_IF_ERROR(
        CheckTensor(x.grad(), y.grad(), "gradient of the input"));
    return CheckThat(model->memory_stats().parameters.in_use_bytes, Eq(0),
                     "bytes of parameters after backward");
  }));
}

TEST(FreezingTest, FreezingAndUnfreezingBetweenSteps) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(Filled<UsedTwice>(), Unowned(communicator),
                                     UnitsOf<UnitImpl>()));
    const auto gradients_of_unit = [&]() -> absl::StatusOr<int> {
      FSDP_RETURN_IF_ERROR(model->Backward(
          SquareLoss([&](const at::Tensor& x) { return model->forward(x); })));
      int count = 0;
      for (const TensorRange& named : model->Ranges()) {
        count += named.name.find("unit.") == 0 && named.values.grad().defined();
        at::Tensor shard = named.values;
        shard.mutable_grad().reset();
      }
      return count;
    };
    for (const auto& [trainable, expected] :
         std::vector<std::pair<bool, int>>{{true, 2}, {false, 1}, {true, 2}}) {
      FSDP_RETURN_IF_ERROR(
          model->SetTrainable("unit.linear.weight", trainable));
      FSDP_ASSIGN_OR_RETURN(const int count, gradients_of_unit());
      EXPECT_EQ(count, expected);
    }
    // Every forward also reads the flag of the module's own parameter.
    model->module()->unit->linear->bias.set_requires_grad(false);
    FSDP_ASSIGN_OR_RETURN(const int count, gradients_of_unit());
    return CheckThat(count, Eq(1),
                     "count of gradients without that of the bias");
  }));
}

class TiedPair : public torch::nn::Module {
 public:
  TiedPair()
      : weight_(register_parameter("weight", at::ones({kDim, kDim}))),
        inner_(register_module("inner", std::make_shared<Inner>(weight_))) {}
  at::Tensor forward(const at::Tensor& x) {
    return Forward(inner_, x.matmul(weight_));
  }

 private:
  class Inner : public torch::nn::Module {
   public:
    explicit Inner(const at::Tensor& tied)
        : same(register_parameter("same", tied)) {}
    at::Tensor forward(const at::Tensor& x) { return x.matmul(same).tanh(); }
    at::Tensor same;
  };

  at::Tensor weight_;
  std::shared_ptr<Inner> inner_;
};

TEST(FreezingTest, ATiedParameterIsFrozenByAnyOfItsNames) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(std::make_shared<TiedPair>(),
                                                 Unowned(communicator)));
    FSDP_RETURN_IF_ERROR(model->SetTrainable("inner.same", false));
    return model->Parameters().front().requires_grad()
               ? absl::InternalError("still trainable")
               : absl::OkStatus();
  }));
}

}  // namespace
}  // namespace fsdp::testing
