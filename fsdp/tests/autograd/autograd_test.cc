// Sharded units in autograd graphs of every shape, and hooks on parameters,
// each compared with the same module without sharding. KnownProgramTest has
// hooks registered before and after sharding.
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <thread>

#include "fsdp/model/forward.h"
#include "fsdp/recompute/checkpoint.h"
#include "fsdp/testing/gradient_check.h"

namespace fsdp::testing {
namespace {

template <typename Net, typename... Units>
void ExpectAsPlain() {
  ExpectSameGradients<Net>(Filled<Net>, SquareLoss, UnitsOf<Units...>());
}

class TupleUnit : public torch::nn::Module {
 public:
  std::tuple<at::Tensor, std::vector<at::Tensor>> forward(const at::Tensor& x) {
    const at::Tensor y = linear->forward(x);
    return {y, {y * 2, x}};
  }
  Linear linear = register_module("linear", Linear(kDim, kDim));
};

class TakesTuple : public torch::nn::Module {
 public:
  TakesTuple() : unit(register_module("unit", std::make_shared<TupleUnit>())) {}
  at::Tensor forward(const at::Tensor& x) {
    auto [y, more] = Forward(unit, x);
    return y + more[0] * more[1];
  }
  std::shared_ptr<TupleUnit> unit;
};

TEST(AutogradTest, OutputsInTuplesAndVectorsAndInputsHandedThrough) {
  ExpectAsPlain<TakesTuple, TupleUnit>();
}

class SparseEmbedding : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor indices = at::arange(x.size(0)) * 3;
    return at::embedding(weight, indices, /*padding_idx=*/-1,
                         /*scale_grad_by_freq=*/false, /*sparse=*/true) *
           x;
  }
  at::Tensor weight = register_parameter("weight", at::zeros({11, kDim}));
};

TEST(AutogradTest, SparseGradients) { ExpectAsPlain<SparseEmbedding>(); }

class TransposedWeight : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    // expand() gives `scale` a gradient with stride 0.
    return x.matmul(weight) + scale.expand({x.size(0), 3});
  }
  at::Tensor weight = register_parameter("weight", at::zeros({3, kDim}).t());
  at::Tensor scale = register_parameter("scale", at::zeros({}));
};

TEST(AutogradTest, TransposedAndScalarParameters) {
  ExpectSameGradients<TransposedWeight>(
      [] {
        auto net = std::make_shared<TransposedWeight>();
        c10::NoGradGuard no_grad;
        net->weight.copy_(Rows(2, kDim, 3));
        net->scale.fill_(0.5);
        return net;
      },
      SquareLoss, Options());
}

// The ways in which a net of a unit and a head calls the unit.
at::Tensor ByForward(Mlp& net, const at::Tensor& x) {
  return net.second->forward(Forward(net.first, x).tanh());
}
at::Tensor InARegion(Mlp& net, const at::Tensor& x) {
  const auto unit = [&net](const at::Tensor& y) {
    return Forward(net.first, y);
  };
  return net.second->forward(Checkpoint(unit, x).tanh());
}
at::Tensor Directly(Mlp& net, const at::Tensor& x) {
  return net.second->forward(net.first->forward(x).tanh());
}
at::Tensor Twice(Mlp& net, const at::Tensor& x) {
  return net.second->forward(Forward(net.first, Forward(net.first, x).tanh()));
}

Options FirstAsUnit() {
  Options options;
  options.wrap_policy = [](const WrapCandidate& candidate) {
    return candidate.path == "first";
  };
  return options;
}

// Runs each forward on a thread of its own, which has ended when backward
// begins.
absl::Status TwoForwardsOnThreads(Communicator& world, bool one_backward) {
  FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(std::make_shared<Mlp>(Twice),
                                               Unowned(world), FirstAsUnit()));
  auto plain = std::make_shared<Mlp>(Twice);
  const auto loss_of = [&](const std::function<at::Tensor(at::Tensor)>& net,
                           int64_t row) {
    at::Tensor loss;
    std::thread thread([&] { loss = net(Rows(row, 2, kDim)).square().mean(); });
    thread.join();
    return loss;
  };
  std::vector<at::Tensor> losses;
  for (const int64_t row : {0, 5}) {
    loss_of([&](const at::Tensor& x) { return plain->forward(x); }, row)
        .backward();
    losses.push_back(
        loss_of([&](const at::Tensor& x) { return model->forward(x); }, row));
    if (!one_backward) FSDP_RETURN_IF_ERROR(model->Backward(losses.back()));
  }
  if (one_backward) {
    FSDP_RETURN_IF_ERROR(model->Backward(losses[0] + losses[1]));
  }
  return CheckMeans(*model, *plain, /*world_size=*/1);
}

TEST(AutogradTest, ForwardsOnThreadsWithABackwardForEach) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) {
    return TwoForwardsOnThreads(world, /*one_backward=*/false);
  }));
}

TEST(AutogradTest, OneBackwardThroughForwardsOfTwoThreadsIsRefused) {
  EXPECT_THAT(RunAllRanks(2,
                          [](Communicator& world) {
                            return TwoForwardsOnThreads(world,
                                                        /*one_backward=*/true);
                          }),
              StatusIs(Code::kFailedPrecondition,
                       HasSubstr("through forwards of two threads")));
}

// A net whose control flow depends on the data.
class MaybeUsed : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x, bool use) {
    return use ? linear->forward(x) : x * 2;
  }
  Linear linear = register_module("linear", Linear(kDim, kDim));
};

// The surrounding unit computes its own gradients last on both ranks.
class MaybeUsedInside : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x, bool use) {
    return Forward(maybe, own->forward(x), use);
  }
  std::shared_ptr<MaybeUsed> maybe =
      register_module("maybe", std::make_shared<MaybeUsed>());
  Linear own = register_module("own", Linear(kDim, kDim));
};

class RankDependentInside : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x, bool use) {
    return Forward(around, x, use);
  }
  std::shared_ptr<MaybeUsedInside> around =
      register_module("around", std::make_shared<MaybeUsedInside>());
};

// The net of rank 0 uses the parameters that depend on data, and that of rank 1
// does not: it takes part in their reduction with zeros.
TEST(AutogradTest, AUnitInsideAnotherWhoseParametersOnlyOneRankUses) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        auto model, FullyShard(Filled<RankDependentInside>(), Unowned(world),
                               UnitsOf<MaybeUsedInside, MaybeUsed>()));
    auto plain = Filled<RankDependentInside>();
    const at::Tensor x = Rows(0, 2, kDim);
    (plain->forward(x, true).sum() + plain->forward(x, false).sum()).backward();
    FSDP_RETURN_IF_ERROR(
        model->Backward(model->forward(x, world.rank() == 0).sum()));
    return CheckMeans(*model, *plain, /*world_size=*/2, 1e-5, 1e-8);
  }));
}

// --- Hooks on parameters -----------------------------------------------------

using ::torch::nn::LinearImpl;

// A hook that is not linear, and whose order with others matters.
at::Tensor Clamp(const at::Tensor& gradient) {
  return gradient.clamp(-0.01, 0.02);
}
at::Tensor AddTo(const at::Tensor& gradient) { return gradient * 2 + 0.01; }

void Register(Mlp& net) {
  net.first->weight.register_hook(Clamp);
  net.first->weight.register_hook(AddTo);
  net.second->bias.register_hook(AddTo);
  net.second->bias.register_hook(Clamp);
}

at::Tensor LossOf(const at::Tensor& output) { return output.square().sum(); }

at::Tensor RowsOf(int rank) { return Rows(rank * 100, 3, kDim); }

Gradients PlainMeans(bool freezes, int world_size) {
  Gradients means;
  for (int rank = 0; rank < world_size; ++rank) {
    Mlp net(Directly);
    Register(net);
    if (freezes) net.second->bias.set_requires_grad(false);
    LossOf(net.forward(RowsOf(rank))).backward();
    AddShare(net, world_size, means);
  }
  return means;
}

// Checks hooks that are registered between a forward and its backward, or whose
// parameter is frozen after sharding.
absl::Status CheckHooks(Communicator& world, const Mlp::Body& body,
                        bool transparent, bool freezes) {
  auto net = std::make_shared<Mlp>(body);
  if (freezes) Register(*net);
  Options options = FirstAsUnit();
  options.transparent = transparent;
  FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world), options));
  if (freezes) FSDP_RETURN_IF_ERROR(model->SetTrainable("second.bias", false));
  const at::Tensor loss = LossOf(model->forward(RowsOf(world.rank())));
  if (!freezes) Register(*net);
  FSDP_RETURN_IF_ERROR(model->Backward(loss));
  return CheckOwnGradients(*model, PlainMeans(freezes, world.world_size()));
}

TEST(ParameterHooksTest, SeeWholeGradientsAlsoIfRegisteredAfterForward) {
  for (const auto& body : {ByForward, InARegion, Directly}) {
    EXPECT_OK(RunAllRanks(2, [&](Communicator& world) {
      return CheckHooks(world, body, /*transparent=*/body == Directly,
                        /*freezes=*/false);
    }));
  }
}

TEST(ParameterHooksTest, OfFrozenParametersDoNotRun) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) {
    return CheckHooks(world, ByForward, /*transparent=*/false,
                      /*freezes=*/true);
  }));
}

// A hook on one tensor with two names sees the sum, too.
TEST(ParameterHooksTest, OfATiedParameterSeeTheSum) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    const auto body = [](Mlp& net, const at::Tensor& x) {
      return Forward(net.second, Forward(net.first, x).tanh());
    };
    at::Tensor expected = at::zeros({kDim, kDim});
    for (int rank = 0; rank < 2; ++rank) {
      Mlp plain(body);
      FSDP_RETURN_IF_ERROR(Tie(plain.first->weight, plain.second->weight));
      LossOf(plain.forward(RowsOf(rank))).backward();
      expected +=
          Clamp(plain.first->weight.grad() + plain.second->weight.grad()) / 2;
    }
    auto net = std::make_shared<Mlp>(body);
    FSDP_RETURN_IF_ERROR(Tie(net->first->weight, net->second->weight));
    net->second->weight.register_hook(Clamp);
    FSDP_ASSIGN_OR_RETURN(
        auto model, FullyShard(net, Unowned(world), UnitsOf<LinearImpl>()));
    FSDP_RETURN_IF_ERROR(
        model->Backward(LossOf(model->forward(RowsOf(world.rank())))));
    for (const TensorRange& named : model->Ranges()) {
      if (named.name != "first.weight") continue;
      FSDP_RETURN_IF_ERROR(CheckTensor(named.values.grad(),
                                       OwnPart(named, expected), 1e-4, 1e-6,
                                       "gradient of the tied parameter"));
    }
    return absl::OkStatus();
  }));
}

struct CountCalls final : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor&) override {}
};

// `before` and `after` act before and after sharding.
void ExpectRefused(const Mlp::Body& body,
                   const std::function<void(Mlp&)>& before,
                   const std::function<void(ShardedModuleBase&)>& after,
                   const std::string& text) {
  EXPECT_THAT(RunAllRanks(2,
                          [&](Communicator& world) -> absl::Status {
                            auto net = std::make_shared<Mlp>(body);
                            before(*net);
                            FSDP_ASSIGN_OR_RETURN(
                                auto model,
                                FullyShard(net, Unowned(world), FirstAsUnit()));
                            after(*model);
                            return TorchToStatus("step", [&] {
                              ThrowIfError(model->Backward(LossOf(
                                  model->forward(RowsOf(world.rank())))));
                            });
                          }),
              StatusIs(Code::kFailedPrecondition, HasSubstr(text)));
}

TEST(ParameterHooksTest, ThatCannotSeeAWholeGradientAreRefused) {
  const auto nothing = [](const auto&) {};
  ExpectRefused(Twice, Register, nothing, "the hook on parameter first.weight");
  ExpectRefused(
      ByForward, nothing,
      [](ShardedModuleBase& model) {
        model.Ranges().back().values.register_hook(AddTo);
      },
      "a hook on the shard of");
  ExpectRefused(
      ByForward,
      [](Mlp& net) {
        torch::autograd::impl::set_post_acc_grad_hooks(
            net.second->weight, std::make_unique<CountCalls>());
      },
      nothing, "a post-accumulate-grad hook on parameter second.weight");
}

}  // namespace
}  // namespace fsdp::testing
