// A step refuses with a clear error on every rank, and the model still works.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/sgd.h>

#include <thread>

#include "base/testing/warnings.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/tests/models/sharded_net.h"

namespace fsdp::testing::sharded_net {
namespace {

using Code = absl::StatusCode;

TEST(ShardedModelTest, RefusesAnInnerUnitWithGradOutsideItsRoot) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) {
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(communicator));
    auto block = model.module()->blocks->ptr(0);
    absl::Status status = TorchToStatus(
        "forward", [&] { Forward(*block->as<BlockImpl>(), Rows(0, 2, kDim)); });
    if (!::testing::Value(
            status, StatusIs(Code::kFailedPrecondition,
                             HasSubstr("forward with grad of unit blocks.0 "
                                       "outside a forward of its root")))) {
      return absl::InternalError(status.ToString());
    }
    // Without grad there is no backward to miss.
    c10::NoGradGuard no_grad;
    Forward(*block->as<BlockImpl>(), Rows(0, 2, kDim));
    c10::AutoGradMode grad(true);
    return CheckStepIsExact(model, communicator);
  }));
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
    for (int step = 0; step < 2; ++step) {
      absl::Status status = TorchToStatus("optimizer", [&] {
        torch::optim::SGD optimizer(model.module()->parameters(), 0.1);
      });
      if (!::testing::Value(status, StatusIs(Code::kInternal,
                                             HasSubstr("non-leaf Tensor")))) {
        return absl::InternalError(status.ToString());
      }
      FSDP_RETURN_IF_ERROR(CheckStepIsExact(model, communicator));
    }
    return absl::OkStatus();
  }));
}

// A unit that does to its own parameter what `act` says.
class Misbehaving : public torch::nn::Module {
 public:
  using Act = std::function<at::Tensor(const at::Tensor& x, at::Tensor& p)>;
  explicit Misbehaving(Act act)
      : p(register_parameter("p", at::ones({kDim, kDim}))),
        act_(std::move(act)) {}
  at::Tensor forward(const at::Tensor& x) { return act_(x, p); }
  at::Tensor p;

 private:
  Act act_;
};

void ExpectForwardRefused(const Misbehaving::Act& act,
                          const std::string& text) {
  const std::vector<absl::Status> statuses =
      RunRanks(kRanks, [&](Communicator& communicator) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(auto model,
                              FullyShard(std::make_shared<Misbehaving>(act),
                                         Unowned(communicator)));
        return TorchToStatus("forward",
                             [&] { model->forward(Rows(0, 2, kDim)); });
      });
  EXPECT_THAT(statuses,
              Each(StatusIs(Code::kFailedPrecondition, HasSubstr(text))));
}

TEST(ShardedModelTest, RefusesAParameterModifiedInPlace) {
  ExpectForwardRefused(
      [](const at::Tensor& x, at::Tensor& p) {
        c10::NoGradGuard no_grad;
        p.mul_(2);
        return x.matmul(p);
      },
      "parameter p was modified in place");
}

TEST(ShardedModelTest, RefusesAParameterConvertedOrReplaced) {
  ExpectForwardRefused(
      [](const at::Tensor& x, at::Tensor& p) {
        p.set_data(at::zeros({kDim, kDim}));
        return x.matmul(p);
      },
      "parameter p no longer looks into its unit's memory");
}

TEST(ShardedModelTest, RefusesAnOutputThatIsAParameterOrAViewOfOne) {
  ExpectForwardRefused([](const at::Tensor&, at::Tensor& p) { return p; },
                       "is a parameter or a view of one");
  ExpectForwardRefused(
      [](const at::Tensor&, at::Tensor& p) { return p.t().narrow(0, 1, 2); },
      "is a parameter or a view of one");
}

TEST(ShardedModelTest, RefusesCreateGraph) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) {
    Options options = BlockUnits();
    options.abort_on_failure = false;
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(communicator, options));
    const at::Tensor x = Rows(0, 2, kDim);
    absl::Status status = TorchToStatus("backward", [&] {
      Loss(model->forward(x), x)
          .backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    });
    if (!::testing::Value(status, StatusIs(Code::kFailedPrecondition,
                                           HasSubstr("create_graph=true")))) {
      return absl::InternalError(status.ToString());
    }
    return CheckStepIsExact(model, communicator);
  }));
}

TEST(ShardedModelTest, RefusesAutogradGradWithRespectToAParameter) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) {
    Options options = BlockUnits();
    options.abort_on_failure = false;
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(communicator, options));
    const at::Tensor x = Rows(0, 2, kDim).requires_grad_();
    const at::Tensor loss = Loss(model->forward(x), x);
    absl::Status status = TorchToStatus("grad", [&] {
      torch::autograd::grad({loss}, {model.module()->head->weight});
    });
    if (!::testing::Value(status,
                          StatusIs(Code::kFailedPrecondition,
                                   HasSubstr("this rank's gradient alone")))) {
      return absl::InternalError(status.ToString());
    }
    // The gradient with respect to the input equals that without sharding.
    at::Tensor again = Loss(model->forward(x), x);
    const at::Tensor gradient = torch::autograd::grad({again}, {x})[0];
    auto plain = MakeNet(kDim, 2);
    at::Tensor expected = Loss(plain->forward(x), x);
    FSDP_RETURN_IF_ERROR(CheckTensor(gradient,
                                     torch::autograd::grad({expected}, {x})[0],
                                     "gradient of the input"));
    return CheckStepIsExact(model, communicator);
  }));
}

TEST(ShardedModelTest, RefusesAParameterUsedOutsideItsForward) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) {
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(communicator));
    absl::Status status = TorchToStatus(
        "penalty", [&] { model.module()->head->weight.square().sum(); });
    if (!::testing::Value(status, StatusIs(Code::kFailedPrecondition,
                                           HasSubstr("unit root")))) {
      return absl::InternalError(status.ToString());
    }
    return CheckStepIsExact(model, communicator);
  }));
}

class CallsFromAnotherThread : public torch::nn::Module {
 public:
  CallsFromAnotherThread()
      : block(register_module("block", std::make_shared<BlockImpl>(kDim))),
        own(register_module("own", torch::nn::Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    absl::Status status;
    std::thread other(
        [&] { status = TorchToStatus("forward", [&] { Forward(block, x); }); });
    other.join();
    ThrowIfError(status);
    return own->forward(x);
  }
  std::shared_ptr<BlockImpl> block;
  torch::nn::Linear own;
};

TEST(ShardedModelTest, RefusesUnitsOnSeveralThreads) {
  const std::vector<absl::Status> statuses =
      RunRanks(kRanks, [](Communicator& communicator) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(
            auto model, FullyShard(std::make_shared<CallsFromAnotherThread>(),
                                   Unowned(communicator), BlockUnits()));
        return TorchToStatus("forward",
                             [&] { model->forward(Rows(0, 2, kDim)); });
      });
  EXPECT_THAT(statuses, Each(StatusIs(Code::kFailedPrecondition,
                                      HasSubstr("on another thread"))));
}

TEST(ShardedModelTest, RefusesALossThatIsNoneAndGoesOn) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(communicator));
    const at::Tensor x = Rows(0, 2, kDim);
    for (const at::Tensor& loss :
         {at::Tensor(), model->forward(x), at::ones({})}) {
      const absl::Status status = model->Backward(loss);
      if (!::testing::Value(status,
                            StatusIs(Code::kInvalidArgument,
                                     HasSubstr("loss of one element")))) {
        return absl::InternalError(status.ToString());
      }
    }
    return CheckStepIsExact(model, communicator);
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

}  // namespace
}  // namespace fsdp::testing::sharded_net
