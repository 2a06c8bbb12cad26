// Modules stay as their users have made them, whatever they hold, however they
// are traversed and whatever they are called with.
#include <ATen/ATen.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/rnn.h>

#include <stdexcept>

#include "fsdp/model/forward.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/testing/gradient_check.h"

namespace fsdp::testing {
namespace {

using ::torch::nn::LinearImpl;
using ::torch::nn::Sequential;

constexpr int kRanks = 2;

Options LinearUnits() { return UnitsOf<LinearImpl>(); }

template <typename Net>
absl::Status CheckNet(Communicator& world, const Options& options) {
  return CheckGradients<Net>(world, options, Filled<Net>, SquareLoss);
}

// --- Walks -------------------------------------------------------------------

TEST(WalkTest, ShardingAddsAndRemovesNoModule) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    for (const bool transparent : {false, true}) {
      auto net = MakeNet(kDim, 2);
      const auto before = net->modules();
      Options options = BlockUnits();
      options.transparent = transparent;
      FSDP_ASSIGN_OR_RETURN(auto model,
                            FullyShard(net, Unowned(world), options));
      FSDP_RETURN_IF_ERROR(Check(net->modules() == before, "other modules"));
    }
    return absl::OkStatus();
  }));
}

// --- Sequential --------------------------------------------------------------

TEST(SequentialTest, GivesTheModulesThemselvesByEveryWay) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    Linear first(kDim, kDim);
    Linear second(kDim, kDim);
    Sequential sequential(first, torch::nn::Tanh(), second);
    FSDP_ASSIGN_OR_RETURN(
        auto model, FullyShard(sequential, Unowned(world), LinearUnits()));
    return TorchToStatus("walk", [&] {
      ThrowIfError(Check(
          &model.module()->at<LinearImpl>(0) == first.get() &&
              &model.module()->at<LinearImpl>(2) == second.get() &&
              sequential->ptr<LinearImpl>(2) == second.ptr() &&
              sequential->ptr(0) == first.ptr() &&
              sequential->begin()->get<LinearImpl>().options.in_features() ==
                  kDim &&
              sequential->children()[2] == second.ptr(),
          "another module"));
      model->forward(Rows(0, 2, kDim));
    });
  }));
}

class HoldsASequential : public torch::nn::Module {
 public:
  explicit HoldsASequential(bool twice) {
    for (int i = 0; i < 6; ++i) sequential_->push_back(Linear(kDim, kDim));
    register_module("seq", sequential_);
    if (twice) {
      register_module("holder", torch::nn::ModuleList(sequential_.ptr()));
    }
    FillParameters(*sequential_, 1);
  }
  at::Tensor forward(const at::Tensor& x) { return sequential_->forward(x); }

 private:
  Sequential sequential_;
};

// Parameters have one name each, although the module has two.
absl::Status CheckSequential(Communicator& world, bool twice, int64_t& peak) {
  const auto make = [twice] {
    return std::make_shared<HoldsASequential>(twice);
  };
  FSDP_ASSIGN_OR_RETURN(auto model,
                        FullyShard(make(), Unowned(world), LinearUnits()));
  FSDP_RETURN_IF_ERROR(model->Backward(SquareLoss([&](const at::Tensor& x) {
    return model->forward(InputOf(world.rank(), x));
  })));
  peak = model->memory_stats().parameters.peak_in_use_bytes;
  return CheckOwnGradients(*model, PlainGradients<HoldsASequential>(
                                       make, SquareLoss, world.world_size()));
}

TEST(SequentialTest, AtTwoPlacesHoldsNoMoreThanAtOne) {
  std::vector<int64_t> once(kRanks), twice(kRanks);
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    FSDP_RETURN_IF_ERROR(CheckSequential(world, false, once[world.rank()]));
    return CheckSequential(world, true, twice[world.rank()]);
  }));
  EXPECT_GT(once[0], 0);
  EXPECT_EQ(once, twice);
}

// The first child returns a tuple in a tuple, which the second takes.
class LastOutputImpl : public torch::nn::Module {
 public:
  at::Tensor forward(
      std::tuple<at::Tensor, std::tuple<at::Tensor, at::Tensor>> output) {
    return linear->forward(std::get<0>(output));
  }
  Linear linear = register_module("linear", Linear(kDim, kDim));
};

class RecurrentNet : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    return sequential->forward(x.unsqueeze(1));
  }
  Sequential sequential =
      register_module("seq", Sequential(torch::nn::LSTM(kDim, kDim),
                                        std::make_shared<LastOutputImpl>()));
};

TEST(SequentialTest, RunsAUnitThatReturnsTensorsInTuples) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) {
    Options options = UnitsOf<torch::nn::LSTMImpl, LastOutputImpl>();
    return CheckNet<RecurrentNet>(world, options);
  }));
}

class ReturnsANumberImpl : public torch::nn::Module {
 public:
  double forward(const at::Tensor& x) {
    return linear->forward(x).sum().item<float>();
  }
  Linear linear = register_module("linear", Linear(kDim, 1));
};

class NumberNet : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    return x * sequential->forward<double>(x);
  }
  Sequential sequential = register_module(
      "seq",
      Sequential(Linear(kDim, kDim), std::make_shared<ReturnsANumberImpl>()));
};

TEST(SequentialTest, RefusesAUnitInWhoseResultNoTensorsAreSeen) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    const Options options = GoOn(UnitsOf<ReturnsANumberImpl>());
    FSDP_ASSIGN_OR_RETURN(
        auto model, FullyShard(Filled<NumberNet>(), Unowned(world), options));
    return CheckRefused(
        TorchToStatus("forward", [&] { model->forward(Rows(0, 2, kDim)); }),
        "in which no tensors are seen");
  }));
}

// --- What a unit keeps in a member -------------------------------------------

class KeepsALossImpl : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor weights = gate->forward(x).softmax(-1);
    balance = weights.mean(0).square().sum();
    return out->forward(x * weights);
  }
  Linear gate = register_module("gate", Linear(kDim, kDim));
  Linear out = register_module("out", Linear(kDim, kDim));
  at::Tensor balance;
};

class SumsKeptLosses : public torch::nn::Module {
 public:
  SumsKeptLosses() {
    for (int i = 0; i < 2; ++i) {
      units.push_back(register_module(absl::StrCat("unit", i),
                                      std::make_shared<KeepsALossImpl>()));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (const auto& unit : units) y = Forward(unit, y);
    for (const auto& unit : units) y = y + unit->balance;
    return y;
  }
  std::vector<std::shared_ptr<KeepsALossImpl>> units;
};

// A module that returns what it keeps, from use to use.
class KeepsItsStateImpl : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    state = linear->forward(state.defined() ? x + state : x).tanh();
    return state;
  }
  Linear linear = register_module("linear", Linear(kDim, kDim));
  at::Tensor state;
};

class UsesItsState : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    unit->state = at::Tensor();
    at::Tensor y;
    for (int i = 0; i < 3; ++i) y = Forward(unit, x * (i + 1));
    return y;
  }
  std::shared_ptr<KeepsItsStateImpl> unit =
      register_module("unit", std::make_shared<KeepsItsStateImpl>());
};

TEST(KeptTensorTest, HasTheGradientsOfPlainLibTorch) {
  for (const bool transparent : {false, true}) {
    Options options = UnitsOf<KeepsALossImpl, KeepsItsStateImpl>();
    options.transparent = transparent;
    EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
      FSDP_RETURN_IF_ERROR(CheckNet<SumsKeptLosses>(world, options));
      return CheckNet<UsesItsState>(world, options);
    }));
  }
}

TEST(PolicyTest, ThatThrowsOnOneRankIsAnErrorOfAll) {
  const auto statuses = RunRanks(kRanks, [](Communicator& world) {
    Options options;
    options.wrap_policy = [&](const WrapCandidate&) -> bool {
      if (world.rank() == 1) throw std::runtime_error("no such block");
      return false;
    };
    return FullyShard(MakeNet(kDim, 2), Unowned(world), options).status();
  });
  EXPECT_THAT(statuses, AllRefuse("no such block", Code::kUnknown));
}

// --- fsdp::Forward -----------------------------------------------------------

TEST(ForwardTest, RunsUnshardedModulesHoweverTheyAreHeld) {
  Linear holder(kDim, kDim);
  const std::shared_ptr<torch::nn::LinearImpl> pointer = holder.ptr();
  const at::Tensor x = Rows(0, 2, kDim);
  const at::Tensor expected = holder->forward(x);
  EXPECT_TRUE(at::equal(Forward(holder, x), expected));
  EXPECT_TRUE(at::equal(Forward(pointer, x), expected));
  EXPECT_TRUE(at::equal(Forward(*pointer, x), expected));
  EXPECT_FALSE(FindUnit(*pointer).has_value());
}

class ReturnsNothing : public torch::nn::Module {
 public:
  void forward(const at::Tensor& x) { seen = linear->forward(x).detach(); }
  Linear linear = register_module("linear", Linear(kDim, kDim));
  at::Tensor seen;
};

TEST(ForwardTest, RunsModulesThatReturnNothing) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    auto net = std::make_shared<ReturnsNothing>();
    FillParameters(*net, 0);
    const at::Tensor x = Rows(0, 2, kDim);
    net->forward(x);
    const at::Tensor expected = net->seen;
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world)));
    model->forward(x);
    // No backward can come.
    EXPECT_EQ(model->memory_stats().parameters.in_use_bytes, 0);
    return CheckTensor(net->seen, expected, "value");
  }));
}

// A module that moves one argument, has a default for another, and counts
// references.
class TakesMany : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x, double scale,
                     std::unique_ptr<int> shift) {
    return Forward(block, x) * scale + *shift;
  }
  std::shared_ptr<BlockImpl> block =
      register_module("block", std::make_shared<BlockImpl>(kDim));
};

TEST(ForwardTest, ForwardsEveryKindOfArgument) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    auto net = std::make_shared<TakesMany>();
    FillParameters(*net, 0);
    const at::Tensor x = Rows(0, 2, kDim);
    const at::Tensor expected =
        net->forward(x, 2, std::make_unique<int>(1)).detach();
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(net, Unowned(world), BlockUnits()));
    return CheckTensor(model->forward(x, 2, std::make_unique<int>(1)), expected,
                       "output");
  }));
}

TEST(UnitHandleTest, TellsWhichModulesAreUnitsAndKeepsTheModelAlive) {
  EXPECT_OK(RunAllRanks(1, [](Communicator& world) -> absl::Status {
    auto net = testing::MakeNet(kDim, 2);
    const at::Tensor x = Rows(0, 2, kDim);
    {
      std::optional<UnitHandle> root;
      {
        FSDP_ASSIGN_OR_RETURN(auto model,
                              FullyShard(net, Unowned(world), BlockUnits()));
        root = FindUnit(*net);
      }
      const auto block = FindUnit(*net->blocks->ptr(1));
      FSDP_RETURN_IF_ERROR(
          Check(root.has_value() && block.has_value(), "no handles"));
      EXPECT_EQ(root->unit, 0);
      EXPECT_EQ(block->model->unit_name(block->unit), "blocks.1");
      EXPECT_FALSE(FindUnit(*net->head).has_value());
      EXPECT_FALSE(FindUnit(*net->blocks).has_value());
      FSDP_RETURN_IF_ERROR(root->model->Backward(Forward(net, x).sum(), false));
    }
    // Without a handle or a wrapper, the model and its parameters are gone.
    EXPECT_FALSE(FindUnit(*net).has_value());
    return CheckRefused(TorchToStatus("forward", [&] { Forward(net, x); }),
                        "keep what FullyShard()");
  }));
}

// Takes by reference what holds no tensor; literals, too.
class TakesReferences : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x, const std::string& name, int& calls) {
    ++calls;
    return name == "twice" ? x * 2 : x;
  }
  std::shared_ptr<BlockImpl> block =
      register_module("block", std::make_shared<BlockImpl>(kDim));
};

TEST(ForwardTest, ReferencesAndLiteralsReachAUnitThatTakesItsInputsOver) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    auto net = std::make_shared<TakesReferences>();
    for (at::Tensor& p : net->parameters()) p.set_requires_grad(false);
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world)));
    const at::Tensor x = Rows(0, 2, kDim).requires_grad_();
    int calls = 0;
    const at::Tensor y = Forward(net, x, "twice", calls);
    EXPECT_EQ(calls, 1);
    return CheckTensor(y, x * 2, "output");
  }));
}

}  // namespace
}  // namespace fsdp::testing
