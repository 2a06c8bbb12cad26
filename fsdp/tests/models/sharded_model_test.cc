// A step refuses with a clear error on every rank; after that, after exceptions
// and after backwards of the user's own, the model still works.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/optim/sgd.h>

#include "base/testing/users_error.h"
#include "base/testing/warnings.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/training_task.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 4;
constexpr int kRanks = 2;

absl::StatusOr<FullyShardedDataParallel<NetImpl>> ShardNet(
    Communicator& communicator) {
  return FullyShard(MakeNet(kDim, 2), Unowned(communicator), BlockUnits());
}

class CallsDirectly : public torch::nn::Module {
 public:
  CallsDirectly()
      : block(register_module("block", std::make_shared<BlockImpl>(kDim))),
        own(register_module("own", torch::nn::Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    return block->forward(own->forward(x));
  }
  std::shared_ptr<BlockImpl> block;
  torch::nn::Linear own;
};

TEST(ShardedModelTest, RefusesAUnitThatItsParentCallsDirectly) {
  const std::vector<absl::Status> statuses =
      RunRanks(kRanks, [](Communicator& communicator) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(auto model,
                              FullyShard(std::make_shared<CallsDirectly>(),
                                         Unowned(communicator), BlockUnits()));
        return TorchToStatus("forward",
                             [&] { model->forward(Rows(0, 2, kDim)); });
      });
  EXPECT_THAT(statuses,
              Each(StatusIs(Code::kFailedPrecondition,
                            AllOf(HasSubstr("unit block"),
                                  HasSubstr("fsdp::Forward(child")))));
}

TEST(ShardedModelTest, RefusesAnOptimizerOverTheModulesOwnParameters) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) {
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(communicator));
    FSDP_RETURN_IF_ERROR(CheckThat(
        TorchToStatus("optimizer",
                      [&] {
                        torch::optim::SGD optimizer(
                            model.module()->parameters(), 0.1);
                      }),
        StatusIs(Code::kInternal, HasSubstr("non-leaf Tensor")), "refusal"));
    return CheckTrains(model, MakeNet(kDim, 2), kDim);
  }));
}

TEST(ShardedModelTest, RefusesALossThatIsNoneAndGoesOn) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(communicator));
    const at::Tensor x = Rows(0, 2, kDim);
    for (const at::Tensor& loss :
         {at::Tensor(), model->forward(x), at::ones({})}) {
      const absl::Status status = model->Backward(loss);
      FSDP_RETURN_IF_ERROR(CheckThat(
          status,
          StatusIs(Code::kInvalidArgument, HasSubstr("loss of one element")),
          "refusal"));
    }
    return CheckTrains(model, MakeNet(kDim, 2), kDim);
  }));
}

class LeavesOneOut : public torch::nn::Module {
 public:
  LeavesOneOut()
      : used(register_module("used", torch::nn::Linear(2, 2))),
        left(register_module("left", torch::nn::Linear(2, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return used->forward(x); }
  torch::nn::Linear used, left;
};

// Returns rank 0's warnings in `steps` steps of `Net`, each of `losses`
// backwards of one output each.
template <typename Net>
std::string ToldIn(int steps, int losses, bool step_between) {
  Warnings warnings;
  EXPECT_OK(RunAllRanks(2, [&](Communicator& communicator) -> absl::Status {
    Warnings others;
    const c10::WarningUtils::WarningHandlerGuard guard(
        communicator.rank() == 0 ? &warnings : &others);
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(std::make_shared<Net>(),
                                     fsdp::testing::Unowned(communicator)));
    torch::optim::SGD optimizer(model->Parameters(), 0.1);
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      for (int loss = 0; loss < losses; ++loss) {
        const at::Tensor x = at::full({1, 2}, static_cast<double>(loss));
        FSDP_RETURN_IF_ERROR(model->Backward(model->forward(x).sum()));
        if (!step_between && loss + 1 < losses) continue;
        optimizer.step();
        optimizer.zero_grad();
      }
    }
    return Check(others.texts.empty(), others.text());
  }));
  EXPECT_LE(warnings.texts.size(), 1u);
  return warnings.text();
}

TEST(ShardedModelTest, NamesParametersWithoutGradientOnce) {
  EXPECT_EQ(ToldIn<LeavesOneOut>(2, 1, /*step_between=*/true), "");
  EXPECT_THAT(ToldIn<LeavesOneOut>(5, 1, /*step_between=*/true),
              HasSubstr("first 2 steps, so they have no gradient and are not "
                        "trained: left.weight, left.bias"));
}

// Uses one of two layers, such as a policy for 0 and a value for 1, each with a
// loss of its own.
class TakesTurns : public LeavesOneOut {
 public:
  at::Tensor forward(const at::Tensor& x) {
    return x[0][0].item<float>() == 0 ? used->forward(x) : left->forward(x);
  }
};

TEST(ShardedModelTest, LossesThatTakeTurnsUseAllParameters) {
  EXPECT_EQ(ToldIn<TakesTurns>(5, 2, /*step_between=*/false), "");
  // Each loss has its own optimizer, which skips what has no gradient.
  EXPECT_EQ(ToldIn<TakesTurns>(5, 2, /*step_between=*/true), "");
}

class Around : public torch::nn::Module {
 public:
  Around() : net(register_module("net", MakeNet(kDim, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return Forward(net, x); }
  std::shared_ptr<NetImpl> net;
};

TEST(ShardedModelTest, AnErrorOfLibTorchNamesTheInnermostUnit) {
  const std::vector<absl::Status> statuses =
      RunRanks(2, [](Communicator& communicator) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(
            auto model,
            FullyShard(std::make_shared<Around>(), Unowned(communicator),
                       UnitsOf<NetImpl, BlockImpl>()));
        const at::Tensor x = Rows(0, 2, kDim).to(at::kDouble);
        return TorchToStatus("step", [&] { model->forward(x); });
      });
  EXPECT_THAT(statuses,
              Each(StatusIs(Code::kInternal,
                            AllOf(HasSubstr("same dtype"),
                                  HasSubstr("(in the forward of unit net)")))));
}

TEST(ShardedModelTest, AnExceptionInBackwardLeavesAnotherBackwardExact) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(communicator));
    FSDP_ASSIGN_OR_RETURN(auto fresh, ShardNet(communicator));
    const at::Tensor x = Rows(0, 2, kDim).requires_grad_();
    const at::Tensor y = Rows(7, 2, kDim);
    x.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw UsersError("in a hook"); });
    const at::Tensor fails = Loss(model->forward(x), x);
    const at::Tensor loss = Loss(model->forward(y), y);
    if (TorchToStatus("b", [&] { fails.backward(); }).ok()) {
      return absl::InternalError("the hook did not throw");
    }
    for (at::Tensor& shard : model->Parameters()) shard.mutable_grad().reset();
    FSDP_RETURN_IF_ERROR(TorchToStatus("b", [&] { loss.backward(); }));
    FSDP_RETURN_IF_ERROR(fresh->Backward(Loss(fresh->forward(y), y)));
    FSDP_RETURN_IF_ERROR(CheckSameGradients(*model, *fresh));
    FSDP_RETURN_IF_ERROR(
        CheckThat(model->memory_stats().parameters.in_use_bytes, Eq(0),
                  "bytes of parameters after an exception"));
    return CheckTrains(model, MakeNet(kDim, 2), kDim);
  }));
}

TEST(ShardedModelTest, ABackwardAfterTheModelIsGoneIsAnError) {
  EXPECT_OK(RunAllRanks(1, [](Communicator& communicator) -> absl::Status {
    const at::Tensor x = Rows(0, 2, kDim);
    at::Tensor loss;
    {
      FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(communicator));
      loss = Loss(model->forward(x), x);
    }
    absl::Status status = TorchToStatus("b", [&] { loss.backward(); });
    return CheckThat(
        status,
        StatusIs(Code::kFailedPrecondition, HasSubstr("model was destroyed")),
        "refusal");
  }));
}

// Runs a backward inside forward, as for a penalty on gradients, and then uses
// parameters of the unit around.
class InnerBackward : public torch::nn::Module {
 public:
  InnerBackward()
      : block(register_module("block", std::make_shared<BlockImpl>(kDim))),
        own(register_module("own", torch::nn::Linear(kDim, kDim))) {
    testing::FillParameters(*this, 1);
  }
  at::Tensor forward(const at::Tensor& x) {
    Forward(block, own->forward(x)).sum().backward();
    return own->forward(Forward(block, x));
  }
  std::shared_ptr<BlockImpl> block;
  torch::nn::Linear own;
};

TEST(ShardedModelTest, ABackwardInsideAForwardLeavesTheUnitsAroundItAlone) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) -> absl::Status {
    const auto plain = std::make_shared<InnerBackward>();
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(std::make_shared<InnerBackward>(),
                                     Unowned(communicator), BlockUnits()));
    for (int step = 0; step < 2; ++step) {
      const at::Tensor x = Rows(step, 2, kDim);
      plain->forward(x).square().sum().backward();
      FSDP_RETURN_IF_ERROR(model->Backward(model->forward(x).square().sum()));
    }
    const auto expected = plain->named_parameters();
    for (const TensorRange& named : model->Ranges()) {
      const at::Tensor whole = expected[named.name].grad().reshape({-1});
      FSDP_RETURN_IF_ERROR(
          Check(at::allclose(named.values.grad(), OwnPart(named, whole)),
                named.name));
    }
    return absl::OkStatus();
  }));
}

}  // namespace
}  // namespace fsdp::testing
