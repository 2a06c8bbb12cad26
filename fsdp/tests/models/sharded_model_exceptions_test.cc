// After exceptions and backwards of the user's own, every rank has a clear
// error, none hangs, and the model still works.

#include "base/testing/users_error.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/tests/models/sharded_net.h"

namespace fsdp::testing::sharded_net {
namespace {

using Code = absl::StatusCode;

class ThrowsOnDemand : public torch::nn::Module {
 public:
  ThrowsOnDemand() : net(register_module("net", MakeNet(kDim, 2))) {}
  at::Tensor forward(const at::Tensor& x, bool fail) {
    at::Tensor y = Forward(net, x);
    if (fail) throw UsersError("out of coffee");
    return y;
  }
  std::shared_ptr<NetImpl> net;
};

Options NetAndBlockUnits() { return UnitsOf<NetImpl, BlockImpl>(); }

TEST(ShardedModelTest, AnExceptionKeepsItsTypeAndTheNextIterationIsExact) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) -> absl::Status {
    Options options = NetAndBlockUnits();
    options.abort_on_failure = false;
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(std::make_shared<ThrowsOnDemand>(),
                                     Unowned(communicator), options));
    const at::Tensor x = Rows(communicator.rank(), 2, kDim);
    absl::Status status;
    bool kept_type = false;
    status = TorchToStatus("forward", [&] {
      try {
        model->forward(x, true);
      } catch (const UsersError&) {
        kept_type = true;
        throw;
      }
    });
    if (!kept_type) return absl::InternalError(status.ToString());
    FSDP_RETURN_IF_ERROR(
        CheckThat(model->memory_stats().parameters.in_use_bytes, Eq(0),
                  "bytes of parameters after an exception"));
    const at::Tensor loss = Loss(model->forward(x, false), x);
    FSDP_ASSIGN_OR_RETURN(auto fresh, ShardNet(communicator));
    FSDP_RETURN_IF_ERROR(CheckTensor(loss, Loss(fresh->forward(x), x),
                                     "loss after an exception"));
    return model->Backward(loss);
  }));
}

TEST(ShardedModelTest, AnErrorOfLibTorchNamesTheInnermostUnit) {
  const std::vector<absl::Status> statuses =
      RunRanks(2, [](Communicator& communicator) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(
            auto model, FullyShard(std::make_shared<ThrowsOnDemand>(),
                                   Unowned(communicator), NetAndBlockUnits()));
        const at::Tensor x = Rows(0, 2, kDim).to(at::kDouble);
        return TorchToStatus("step", [&] { model->forward(x, false); });
      });
  EXPECT_THAT(statuses,
              Each(StatusIs(Code::kInternal,
                            AllOf(HasSubstr("same dtype"),
                                  HasSubstr("(in the forward of unit net)")))));
}

TEST(ShardedModelTest, AnExceptionOfOneRankEndsItsPeersToo) {
  const std::vector<absl::Status> statuses =
      RunRanks(3, [](Communicator& communicator) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(
            auto model, FullyShard(std::make_shared<ThrowsOnDemand>(),
                                   Unowned(communicator), NetAndBlockUnits()));
        return TorchToStatus("step", [&] {
          for (int step = 0; step < 3; ++step) {
            const at::Tensor x = Rows(step, 2, kDim);
            const bool fail = step == 1 && communicator.rank() == 1;
            ThrowIfError(model->Backward(Loss(model->forward(x, fail), x)));
          }
        });
      });
  EXPECT_THAT(statuses[1], StatusIs(Code::kUnknown, HasSubstr("coffee")));
  for (int peer : {0, 2}) {
    EXPECT_THAT(statuses[peer],
                StatusIs(Code::kAborted,
                         AllOf(HasSubstr("rank 1"), HasSubstr("forward of "))));
  }
}

TEST(ShardedModelTest, AnExceptionInBackwardLeavesTheNextIterationExact) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) -> absl::Status {
    Options options = BlockUnits();
    options.abort_on_failure = false;
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(communicator, options));
    const at::Tensor x = Rows(0, 2, kDim).requires_grad_();
    for (const bool through_us : {true, false}) {
      x.register_hook([](const at::Tensor&) -> at::Tensor {
        throw UsersError("in a hook");
      });
      const at::Tensor loss = Loss(model->forward(x), x);
      const absl::Status status =
          through_us ? model->Backward(loss)
                     : TorchToStatus("b", [&] { loss.backward(); });
      if (!::testing::Value(status,
                            StatusIs(Code::kUnknown, HasSubstr("a hook")))) {
        return absl::InternalError(status.ToString());
      }
      FSDP_RETURN_IF_ERROR(CheckStepIsExact(model, communicator));
    }
    return absl::OkStatus();
  }));
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
    for (size_t i = 0; i < fresh->Parameters().size(); ++i) {
      if (!at::equal(model->Parameters()[i].grad(),
                     fresh->Parameters()[i].grad())) {
        return absl::InternalError(absl::StrCat("gradient ", i, " differs"));
      }
    }
    FSDP_RETURN_IF_ERROR(
        CheckThat(model->memory_stats().parameters.in_use_bytes, Eq(0),
                  "bytes of parameters after an exception"));
    return CheckStepIsExact(model, communicator);
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
    return Check(
        ::testing::Value(status, StatusIs(Code::kFailedPrecondition,
                                          HasSubstr("model was destroyed"))),
        status.ToString());
  }));
}

TEST(ShardedModelTest, AVisitorThatFailsOnOneRankFailsOnAll) {
  const std::vector<absl::Status> statuses =
      RunRanks(3, [](Communicator& communicator) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(communicator));
        return model->ForEachFullParameter(
            [&](const std::string& name, const at::Tensor&) {
              return communicator.rank() == 1 && name == "head.weight"
                         ? absl::DataLossError("disk full")
                         : absl::OkStatus();
            });
      });
  EXPECT_THAT(statuses,
              Each(StatusIs(Code::kDataLoss, HasSubstr("disk full"))));
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
      if (!at::allclose(named.values.grad(), OwnPart(named, whole))) {
        return absl::InternalError(named.name);
      }
    }
    return absl::OkStatus();
  }));
}

}  // namespace
}  // namespace fsdp::testing::sharded_net
