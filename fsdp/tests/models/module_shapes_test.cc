// Modules stay as their users have made them, whatever they hold and however
// they are walked.
#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/status_check.h"
#include "base/testing/status_matchers.h"
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
using ::fsdp::testing::Check;
using ::fsdp::testing::FillParameters;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::Rows;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::Each;
using ::testing::HasSubstr;
using ::torch::nn::Linear;
using ::torch::nn::LinearImpl;
using ::torch::nn::Sequential;

constexpr int64_t kDim = 4;
constexpr int kRanks = 2;

template <typename Net>
std::shared_ptr<Net> Filled() {
  auto net = std::make_shared<Net>();
  FillParameters(*net, 1);
  return net;
}

Options LinearUnits() {
  Options options;
  options.wrap_policy = WrapModules<LinearImpl>();
  return options;
}

// Whether a step of `make()` sharded gives the gradients of the mean over the
// ranks' data, and what memory it takes at most.
template <typename Net>
absl::Status CheckGradients(Communicator& world, const Options& options,
                            int64_t* peak = nullptr) {
  std::shared_ptr<Net> plain = Filled<Net>();
  for (int rank = 0; rank < world.world_size(); ++rank) {
    (plain->forward(Rows(rank, 3, kDim)).square().mean() / world.world_size())
        .backward();
  }
  FSDP_ASSIGN_OR_RETURN(auto model,
                        FullyShard(Filled<Net>(), Unowned(world), options));
  FSDP_RETURN_IF_ERROR(model->Backward(
      model->forward(Rows(world.rank(), 3, kDim)).square().mean()));
  const auto expected = plain->named_parameters();
  for (const NamedShard& named : model->NamedShards()) {
    FSDP_RETURN_IF_ERROR(
        Check(at::allclose(named.shard.grad(),
                           expected[named.name].grad().flatten().narrow(
                               0, named.begin, named.shard.numel()),
                           1e-4, 1e-6),
              absl::StrCat("gradient of ", named.name)));
  }
  if (peak != nullptr) {
    *peak = model->memory_stats().parameters.peak_in_use_bytes;
  }
  return absl::OkStatus();
}

// --- Walks -------------------------------------------------------------------

class WalksItsChildren : public torch::nn::Module {
 public:
  WalksItsChildren() {
    for (int i = 0; i < 3; ++i) {
      register_module(absl::StrCat("layer", i), Linear(kDim, kDim));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& child : children()) {
      x = Forward(*child->as<LinearImpl>(), x).tanh();
    }
    return x;
  }
};

TEST(WalkTest, AForwardMayGoThroughItsChildren) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) {
    return CheckGradients<WalksItsChildren>(world, LinearUnits());
  }));
}

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

class Holder : public torch::nn::Module {
 public:
  explicit Holder(Sequential sequential)
      : sequential_(register_module("seq", std::move(sequential))) {}
  at::Tensor forward(const at::Tensor& x) { return sequential_->forward(x); }

 private:
  Sequential sequential_;
};

template <bool kTwice>
class HoldsASequential : public torch::nn::Module {
 public:
  HoldsASequential() {
    for (int i = 0; i < 6; ++i) sequential_->push_back(Linear(kDim, kDim));
    register_module("seq", sequential_);
    if (kTwice) {
      holder_ =
          register_module("holder", std::make_shared<Holder>(sequential_));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return sequential_->forward(x); }

 private:
  Sequential sequential_;
  std::shared_ptr<Holder> holder_;
};

TEST(SequentialTest, AtTwoPlacesHoldsNoMoreThanAtOne) {
  std::vector<int64_t> once(kRanks), twice(kRanks);
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) {
    return CheckGradients<HoldsASequential<false>>(world, LinearUnits(),
                                                   &once[world.rank()]);
  }));
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) {
    return CheckGradients<HoldsASequential<true>>(world, LinearUnits(),
                                                  &twice[world.rank()]);
  }));
  EXPECT_GT(once[0], 0);
  EXPECT_EQ(once, twice);
}

// Its first child returns a tuple in a tuple, the second takes it.
class LastOutputImpl : public torch::nn::Module {
 public:
  LastOutputImpl() : linear(register_module("linear", Linear(kDim, kDim))) {}
  at::Tensor forward(
      std::tuple<at::Tensor, std::tuple<at::Tensor, at::Tensor>> output) {
    return linear->forward(std::get<0>(output));
  }
  Linear linear;
};

class RecurrentNet : public torch::nn::Module {
 public:
  RecurrentNet()
      : sequential(register_module(
            "seq", Sequential(torch::nn::LSTM(kDim, kDim),
                              std::make_shared<LastOutputImpl>()))) {}
  at::Tensor forward(const at::Tensor& x) {
    return sequential->forward(x.unsqueeze(1));
  }
  Sequential sequential;
};

TEST(SequentialTest, RunsAUnitThatReturnsTensorsInTuples) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) {
    Options options;
    options.wrap_policy = WrapModules<torch::nn::LSTMImpl, LastOutputImpl>();
    return CheckGradients<RecurrentNet>(world, options);
  }));
}

class ReturnsANumberImpl : public torch::nn::Module {
 public:
  ReturnsANumberImpl() : linear(register_module("linear", Linear(kDim, 1))) {}
  double forward(at::Tensor x) {
    return linear->forward(x).sum().item<float>();
  }
  Linear linear;
};

class NumberNet : public torch::nn::Module {
 public:
  NumberNet()
      : sequential(register_module(
            "seq", Sequential(Linear(kDim, kDim),
                              std::make_shared<ReturnsANumberImpl>()))) {}
  at::Tensor forward(const at::Tensor& x) {
    return x * sequential->forward<double>(x);
  }
  Sequential sequential;
};

TEST(SequentialTest, RefusesAUnitInWhoseResultNoTensorsAreSeen) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    Options options;
    options.abort_on_failure = false;
    options.wrap_policy = WrapModules<ReturnsANumberImpl>();
    FSDP_ASSIGN_OR_RETURN(
        auto model, FullyShard(Filled<NumberNet>(), Unowned(world), options));
    const absl::Status status =
        TorchToStatus("forward", [&] { model->forward(Rows(0, 2, kDim)); });
    return Check(
        status.code() == absl::StatusCode::kFailedPrecondition &&
            absl::StrContains(status.message(), "in which no tensors are seen"),
        status.ToString());
  }));
}

// --- What a unit keeps in a member -------------------------------------------

class KeepsALossImpl : public torch::nn::Module {
 public:
  KeepsALossImpl()
      : gate(register_module("gate", Linear(kDim, kDim))),
        out(register_module("out", Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor weights = gate->forward(x).softmax(-1);
    balance = weights.mean(0).square().sum();
    return out->forward(x * weights);
  }
  Linear gate;
  Linear out;
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

// Its output, too, is what it keeps, from use to use.
class KeepsItsStateImpl : public torch::nn::Module {
 public:
  KeepsItsStateImpl() : linear(register_module("linear", Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    state = linear->forward(state.defined() ? x + state : x).tanh();
    return state;
  }
  Linear linear;
  at::Tensor state;
};

class UsesItsState : public torch::nn::Module {
 public:
  UsesItsState()
      : unit(register_module("unit", std::make_shared<KeepsItsStateImpl>())) {}
  at::Tensor forward(const at::Tensor& x) {
    unit->state = at::Tensor();
    at::Tensor y;
    for (int i = 0; i < 3; ++i) y = Forward(unit, x * (i + 1));
    return y;
  }
  std::shared_ptr<KeepsItsStateImpl> unit;
};

TEST(KeptTensorTest, HasTheGradientsOfPlainLibTorch) {
  for (const bool transparent : {false, true}) {
    Options options;
    options.wrap_policy = WrapModules<KeepsALossImpl, KeepsItsStateImpl>();
    options.transparent = transparent;
    EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
      FSDP_RETURN_IF_ERROR(CheckGradients<SumsKeptLosses>(world, options));
      return CheckGradients<UsesItsState>(world, options);
    }));
  }
}

// --- Buffers -----------------------------------------------------------------

class HoldsABuffer : public torch::nn::Module {
 public:
  explicit HoldsABuffer(const at::Tensor& value)
      : linear(register_module("linear", Linear(kDim, kDim))),
        buffer(register_buffer("buffer", value)) {
    FillParameters(*this, 1);
  }
  at::Tensor forward(const at::Tensor& x) { return Forward(linear, x); }
  Linear linear;
  at::Tensor buffer;
};

// A dense copy, comparable.
at::Tensor Values(const at::Tensor& buffer) {
  at::Tensor dense = buffer.layout() == at::kStrided ? buffer.resolve_conj()
                                                     : buffer.to_dense();
  return at::is_complex(dense) ? at::view_as_real(dense).clone()
                               : dense.clone();
}

struct BufferKind {
  std::string name;
  std::function<at::Tensor(double)> make;  // from a rank's own number
};

const BufferKind kBuffers[] = {
    {"Expanded",
     [](double value) {
       return at::full({1, kDim}, value).expand({3, kDim});
     }},
    {"ExpandedTwice",
     [](double value) {
       return at::full({1}, value).expand({3, kDim});
     }},
    {"Strided",
     [](double value) {
       return at::full({kDim, 6}, value).slice(1, 0, 6, 2);
     }},
    {"Transposed",
     [](double value) {
       return at::full({2, 3}, value).t();
     }},
    {"Sparse",
     [](double value) { return (at::eye(kDim) * value).to_sparse(); }},
    {"SparseCsr",
     [](double value) { return (at::eye(kDim) * value).to_sparse_csr(); }},
    {"Complex",
     [](double value) {
       return at::complex(at::full({kDim}, value), at::ones({kDim}));
     }},
    {"Conjugate",
     [](double value) {
       return at::complex(at::full({kDim}, value), at::ones({kDim})).conj();
     }},
    {"Bool",
     [](double value) { return at::full({kDim}, value > 1, at::kBool); }},
    {"Empty",
     [](double) {
       return at::ones({0, 3});
     }},
};

TEST(BufferTest, OfEveryKindIsRank0sAndGoesThroughStateDicts) {
  for (const BufferKind& kind : kBuffers) {
    EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
      auto net = std::make_shared<HoldsABuffer>(kind.make(world.rank() + 1));
      FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world)));
      const at::Tensor expected = Values(kind.make(1));
      FSDP_RETURN_IF_ERROR(
          Check(at::equal(Values(net->buffer), expected), "not rank 0's"));
      FSDP_RETURN_IF_ERROR(
          model->Backward(model->forward(Rows(0, 3, kDim)).sum()));
      FSDP_ASSIGN_OR_RETURN(StateDict dict, model->GatherStateDict());
      FSDP_RETURN_IF_ERROR(Check(at::equal(Values(dict["buffer"]), expected),
                                 "in the state dict"));
      dict["buffer"] = kind.make(5).clone();
      FSDP_RETURN_IF_ERROR(model->LoadStateDict(dict));
      return Check(at::equal(Values(net->buffer), Values(kind.make(5))),
                   "loaded");
    })) << kind.name;
  }
}

TEST(BufferTest, FromRank0AloneIsLoadedWhereItIsDense) {
  for (const BufferKind& kind : kBuffers) {
    EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
      auto net = std::make_shared<HoldsABuffer>(kind.make(world.rank() + 1));
      FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world)));
      FSDP_ASSIGN_OR_RETURN(StateDict dict, model->GatherStateDict());
      dict["buffer"] = kind.make(5).clone();
      LoadOptions load;
      load.rank0_only = true;
      const absl::Status status =
          model->LoadStateDict(world.rank() == 0 ? dict : StateDict(), load);
      if (net->buffer.layout() != at::kStrided) {
        return Check(status.code() == absl::StatusCode::kUnimplemented &&
                         absl::StrContains(status.message(), "is sparse"),
                     status.ToString());
      }
      FSDP_RETURN_IF_ERROR(status);
      return Check(at::equal(Values(net->buffer), Values(kind.make(5))),
                   "loaded");
    })) << kind.name;
  }
}

TEST(BufferTest, AnExpandedOneTakesNoValueThatDiffersWithinIt) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    auto net =
        std::make_shared<HoldsABuffer>(at::ones({1, kDim}).expand({3, kDim}));
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world)));
    FSDP_ASSIGN_OR_RETURN(StateDict dict, model->GatherStateDict());
    dict["buffer"] = at::arange(3 * kDim, at::kFloat).view({3, kDim});
    const absl::Status status = model->LoadStateDict(dict);
    return Check(
        status.code() == absl::StatusCode::kInvalidArgument &&
            absl::StrContains(status.message(),
                              "buffer: values differ where the model's"),
        status.ToString());
  }));
}

// What one rank cannot send all refuse, with one text, and nothing is changed.
TEST(BufferTest, ThatCannotBeSentIsRefusedByAllRanks) {
  const std::vector<std::function<at::Tensor()>> makes = {
      [] {
        return at::ones({8}).as_strided({5, 4}, {1, 1});
      },
      [] { return at::empty({kDim}, at::kMeta); },
      [] {
        return at::zeros({kDim, kDim}).to_sparse();
      }};
  for (const auto& make : makes) {
    const auto statuses = RunRanks(kRanks, [&](Communicator& world) {
      auto net = std::make_shared<HoldsABuffer>(
          world.rank() == 1 ? make() : at::eye(kDim).to_sparse());
      const absl::Status status = FullyShard(net, Unowned(world)).status();
      if (!TorchToStatus("use", [&] { net->linear->weight.sum(); }).ok()) {
        return absl::InternalError("the module was changed");
      }
      return status;
    });
    EXPECT_THAT(statuses, Each(StatusIs(absl::StatusCode::kInvalidArgument,
                                        HasSubstr("buffer"))));
    EXPECT_EQ(statuses[0].message(), statuses[1].message());
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
  EXPECT_THAT(statuses, Each(StatusIs(absl::StatusCode::kUnknown,
                                      HasSubstr("no such block"))));
}

}  // namespace
}  // namespace fsdp
