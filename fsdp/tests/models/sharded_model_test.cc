// A step refuses with a clear error on every rank; after that, after exceptions
// and after backwards of the user's own, the model still works.
#include <torch/optim/sgd.h>

#include "base/testing/users_error.h"
#include "base/testing/warnings.h"
#include "fsdp/testing/gradient_check.h"
#include "fsdp/testing/training_task.h"

namespace fsdp::testing {
namespace {

using ::torch::nn::LinearImpl;

constexpr int kRanks = 2;

absl::StatusOr<FullyShardedDataParallel<NetImpl>> ShardNet(
    Communicator& world) {
  return FullyShard(MakeNet(kDim, 2), Unowned(world), BlockUnits());
}

TEST(ShardedModelTest, RefusesAUnitThatItsParentCallsDirectly) {
  const auto run = [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(Filled<Mlp>(), Unowned(world),
                                                 UnitsOf<LinearImpl>()));
    return TorchToStatus("forward", [&] { model->forward(Rows(0, 2, kDim)); });
  };
  EXPECT_THAT(RunRanks(kRanks, run),
              Each(StatusIs(Code::kFailedPrecondition,
                            AllOf(HasSubstr("unit first"),
                                  HasSubstr("fsdp::Forward(child")))));
}

// Returns rank 0's warnings in `steps` steps of a net that does not use all.
std::string ToldIn(int steps) {
  Warnings warnings;
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    Warnings others;
    const c10::WarningUtils::WarningHandlerGuard guard(
        world.rank() == 0 ? &warnings : &others);
    const auto net = std::make_shared<Mlp>([](Mlp& n, const at::Tensor& x) {
      return n.second->forward(n.first->forward(x));
    });
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world)));
    torch::optim::SGD optimizer(model->Parameters(), 0.1);
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      FSDP_RETURN_IF_ERROR(
          model->Backward(model->forward(Rows(0, 1, kDim)).sum()));
      optimizer.step();
    }
    return Check(others.texts.empty(), others.text());
  }));
  EXPECT_LE(warnings.texts.size(), 1u);
  return warnings.text();
}

TEST(ShardedModelTest, NamesParametersWithoutGradientOnce) {
  EXPECT_EQ(ToldIn(2), "");
  EXPECT_THAT(ToldIn(5),
              HasSubstr("first 2 steps, so they have no gradient and are not "
                        "trained: third.weight, third.bias"));
}

class Around : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) { return Forward(net, x); }
  std::shared_ptr<NetImpl> net = register_module("net", MakeNet(kDim, 2));
};

TEST(ShardedModelTest, AnErrorOfLibTorchNamesTheInnermostUnit) {
  const std::vector<absl::Status> statuses =
      RunRanks(2, [](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(
            auto model, FullyShard(std::make_shared<Around>(), Unowned(world),
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
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(world));
    FSDP_ASSIGN_OR_RETURN(auto fresh, ShardNet(world));
    const at::Tensor x = Rows(0, 2, kDim).requires_grad_();
    const at::Tensor y = Rows(7, 2, kDim);
    x.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw UsersError("in a hook"); });
    const at::Tensor fails = Loss(model->forward(x), x);
    const at::Tensor loss = Loss(model->forward(y), y);
    EXPECT_FALSE(TorchToStatus("b", [&] { fails.backward(); }).ok());
    for (at::Tensor& shard : model->Parameters()) shard.mutable_grad().reset();
    FSDP_RETURN_IF_ERROR(TorchToStatus("b", [&] { loss.backward(); }));
    FSDP_RETURN_IF_ERROR(fresh->Backward(Loss(fresh->forward(y), y)));
    FSDP_RETURN_IF_ERROR(CheckSameGradients(*model, *fresh));
    EXPECT_EQ(model->memory_stats().parameters.in_use_bytes, 0);
    return CheckTrains(model, MakeNet(kDim, 2), kDim);
  }));
}

TEST(ShardedModelTest, ABackwardAfterTheModelIsGoneIsAnError) {
  EXPECT_OK(RunAllRanks(1, [](Communicator& world) -> absl::Status {
    const at::Tensor x = Rows(0, 2, kDim);
    at::Tensor loss;
    {
      FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(world));
      loss = Loss(model->forward(x), x);
    }
    return CheckRefused(TorchToStatus("b", [&] { loss.backward(); }),
                        "model was destroyed");
  }));
}

// Runs a backward inside forward, as for a penalty on gradients, and then uses
// parameters of the unit around.
TEST(ShardedModelTest, ABackwardInsideAForwardLeavesTheUnitsAroundItAlone) {
  const auto body = [](Mlp& net, const at::Tensor& x) {
    Forward(net.second, net.first->forward(x)).sum().backward();
    return net.first->forward(Forward(net.second, x));
  };
  Options options;
  options.wrap_policy = [](const WrapCandidate& candidate) {
    return candidate.path == "second";
  };
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    Mlp plain(body);
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(std::make_shared<Mlp>(body),
                                                 Unowned(world), options));
    for (int step = 0; step < 2; ++step) {
      const at::Tensor x = Rows(step, 2, kDim);
      plain.forward(x).square().sum().backward();
      FSDP_RETURN_IF_ERROR(model->Backward(model->forward(x).square().sum()));
    }
    return CheckMeans(*model, plain, /*world_size=*/1);
  }));
}

}  // namespace
}  // namespace fsdp::testing
