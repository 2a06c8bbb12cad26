#include "fsdp/model/sharded_model.h"

// What a step refuses, and what the user's own exceptions leave behind: a clear
// error on every rank, no hang, and a model that still works.
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_error.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "base/testing/warnings.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::testing::BlockImpl;
using ::fsdp::testing::BlockUnits;
using ::fsdp::testing::Loss;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::NetImpl;
using ::fsdp::testing::Rows;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::fsdp::testing::Warnings;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr int64_t kDim = 4;
constexpr int kRanks = 2;

absl::StatusOr<FullyShardedDataParallel<NetImpl>> ShardNet(
    Communicator& communicator, Options options = BlockUnits()) {
  return FullyShard(MakeNet(kDim, 2), Unowned(communicator), options);
}

// The losses and gradients of a step are what they are in a model that has
// never seen a misuse.
absl::Status CheckStepIsExact(FullyShardedDataParallel<NetImpl>& model,
                              Communicator& communicator) {
  FSDP_ASSIGN_OR_RETURN(FullyShardedDataParallel<NetImpl> fresh,
                        ShardNet(communicator));
  const at::Tensor x = Rows(communicator.rank(), 2, kDim);
  const at::Tensor loss = Loss(model->forward(x), x);
  const at::Tensor expected = Loss(fresh->forward(x), x);
  for (at::Tensor& shard : model->Parameters()) shard.mutable_grad().reset();
  FSDP_RETURN_IF_ERROR(model->Backward(loss));
  FSDP_RETURN_IF_ERROR(fresh->Backward(expected));
  if (!at::equal(loss, expected)) return absl::InternalError("loss differs");
  for (size_t i = 0; i < fresh->Parameters().size(); ++i) {
    if (!at::equal(model->Parameters()[i].grad(),
                   fresh->Parameters()[i].grad())) {
      return absl::InternalError(absl::StrCat("gradient ", i, " differs"));
    }
  }
  return absl::OkStatus();
}

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
    // With respect to the input it is as good as without sharding.
    at::Tensor again = Loss(model->forward(x), x);
    const at::Tensor gradient = torch::autograd::grad({again}, {x})[0];
    auto plain = MakeNet(kDim, 2);
    at::Tensor expected = Loss(plain->forward(x), x);
    if (!at::equal(gradient, torch::autograd::grad({expected}, {x})[0])) {
      return absl::InternalError("gradient of the input");
    }
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

class UsersError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

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

Options NetAndBlockUnits() {
  Options options;
  options.wrap_policy = WrapModules<NetImpl, BlockImpl>();
  return options;
}

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
    if (model->memory_stats().parameters.in_use_bytes != 0) {
      return absl::InternalError("unsharded memory is left");
    }
    const at::Tensor loss = Loss(model->forward(x, false), x);
    FSDP_ASSIGN_OR_RETURN(auto fresh, ShardNet(communicator));
    if (!at::equal(loss, Loss(fresh->forward(x), x))) {
      return absl::InternalError("loss after an exception");
    }
    return model->Backward(loss);
  }));
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
    if (model->memory_stats().parameters.in_use_bytes != 0) {
      return absl::InternalError("unsharded memory is left");
    }
    return CheckStepIsExact(model, communicator);
  }));
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

TEST(ShardedModelTest, ABackwardAfterTheModelIsGoneIsAnError) {
  EXPECT_OK(RunAllRanks(1, [](Communicator& communicator) -> absl::Status {
    const at::Tensor x = Rows(0, 2, kDim);
    at::Tensor loss;
    {
      FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(communicator));
      loss = Loss(model->forward(x), x);
    }
    absl::Status status = TorchToStatus("b", [&] { loss.backward(); });
    if (!::testing::Value(status, StatusIs(Code::kFailedPrecondition,
                                           HasSubstr("model was destroyed")))) {
      return absl::InternalError(status.ToString());
    }
    return absl::OkStatus();
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

class LeavesOneOut : public torch::nn::Module {
 public:
  LeavesOneOut()
      : used(register_module("used", torch::nn::Linear(2, 2))),
        left(register_module("left", torch::nn::Linear(2, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return used->forward(x); }
  torch::nn::Linear used, left;
};

TEST(ShardedModelTest, NamesParametersWithoutGradientInTheFirstStepOnce) {
  Warnings warnings;
  EXPECT_OK(RunAllRanks(2, [&](Communicator& communicator) -> absl::Status {
    Warnings others;
    const c10::WarningUtils::WarningHandlerGuard guard(
        communicator.rank() == 0 ? &warnings : &others);
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(std::make_shared<LeavesOneOut>(),
                                     fsdp::testing::Unowned(communicator)));
    for (int step = 0; step < 2; ++step) {
      FSDP_RETURN_IF_ERROR(
          model->Backward(model->forward(at::ones({1, 2})).sum()));
    }
    return others.count == 0 ? absl::OkStatus()
                             : absl::InternalError(others.text);
  }));
  EXPECT_EQ(warnings.texts.size(), 1u);
  EXPECT_THAT(warnings.text(), HasSubstr("left.weight, left.bias"));
}

// Backward inside forward, as for a penalty on gradients, and parameters of the
// unit around it that are used afterwards.
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
    for (const NamedShard& named : model->NamedShards()) {
      const at::Tensor whole = expected[named.name].grad().reshape({-1});
      if (!at::allclose(named.shard.grad(),
                        whole.narrow(0, named.begin, named.shard.numel()))) {
        return absl::InternalError(named.name);
      }
    }
    return absl::OkStatus();
  }));
}

}  // namespace
}  // namespace fsdp
