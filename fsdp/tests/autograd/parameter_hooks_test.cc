
// Compares hooks on parameters with plain LibTorch on each rank.
// KnownProgramTest has hooks registered before and after sharding.
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "fsdp/model/forward.h"
#include "fsdp/recompute/checkpoint.h"
#include "fsdp/testing/gradient_check.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using ::torch::nn::LinearImpl;

enum class Way { kForward, kRegion, kTransparent, kUsedTwice };

class HookedNet : public torch::nn::Module {
 public:
  explicit HookedNet(Way way = Way::kForward)
      : unit(register_module("unit", std::make_shared<UnitImpl>())),
        head(register_module("head", Linear(kDim, kDim))),
        way_(way) {}
  at::Tensor forward(const at::Tensor& x) {
    switch (way_) {
      case Way::kForward:
        return head->forward(Forward(unit, x).tanh());
      case Way::kRegion:
        return head->forward(
            Checkpoint(
                [unit = unit](const at::Tensor& y) { return Forward(unit, y); },
                x)
                .tanh());
      case Way::kTransparent:
        return head->forward(unit->forward(x).tanh());
      case Way::kUsedTwice:
        return head->forward(Forward(unit, Forward(unit, x).tanh()));
    }
    return x;
  }
  std::shared_ptr<UnitImpl> unit;
  Linear head;

 private:
  const Way way_;
};

std::shared_ptr<HookedNet> MakeNet(Way way) {
  auto net = std::make_shared<HookedNet>(way);
  testing::FillParameters(*net, 1);
  return net;
}

// A hook that is not linear, and whose order with others matters.
at::Tensor Clamp(const at::Tensor& gradient) {
  return gradient.clamp(-0.01, 0.02);
}
at::Tensor AddTo(const at::Tensor& gradient) { return gradient * 2 + 0.01; }

void Register(HookedNet& net) {
  net.unit->linear->weight.register_hook(Clamp);
  net.unit->linear->weight.register_hook(AddTo);
  net.head->bias.register_hook(AddTo);
  net.head->bias.register_hook(Clamp);
}

at::Tensor LossOf(const at::Tensor& output) { return output.square().sum(); }

at::Tensor RowsOf(int rank) { return Rows(rank * 100, 3, kDim); }

void Freeze(HookedNet& net) { net.head->bias.set_requires_grad(false); }

Gradients PlainMeans(bool freezes, int world_size) {
  Gradients means;
  for (int rank = 0; rank < world_size; ++rank) {
    auto net = MakeNet(Way::kForward);
    Register(*net);
    if (freezes) Freeze(*net);
    LossOf(net->forward(RowsOf(rank))).backward();
    AddShare(*net, world_size, means);
  }
  return means;
}

// Checks hooks that are registered between a forward and its backward, or whose
// parameter is frozen after sharding.
absl::Status CheckHooks(Communicator& world, Way way, bool freezes) {
  auto net = MakeNet(way);
  if (freezes) Register(*net);
  Options options = UnitsOf<UnitImpl>();
  options.transparent = way == Way::kTransparent;
  FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world), options));
  if (freezes) FSDP_RETURN_IF_ERROR(model->SetTrainable("head.bias", false));
  const at::Tensor loss = LossOf(model->forward(RowsOf(world.rank())));
  if (!freezes) Register(*net);
  FSDP_RETURN_IF_ERROR(model->Backward(loss));
  return CheckMeans(world, *model, PlainMeans(freezes, world.world_size()));
}

TEST(ParameterHooksTest, SeeWholeGradientsAlsoIfRegisteredAfterForward) {
  for (const Way way : {Way::kForward, Way::kRegion, Way::kTransparent}) {
    EXPECT_OK(RunAllRanks(2, [&](Communicator& world) {
      return CheckHooks(world, way, /*freezes=*/false);
    })) << static_cast<int>(way);
  }
}

TEST(ParameterHooksTest, OfFrozenParametersDoNotRun) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) {
    return CheckHooks(world, Way::kForward, /*freezes=*/true);
  }));
}

class TiedNet : public torch::nn::Module {
 public:
  TiedNet()
      : a(register_module("a", Linear(kDim, kDim))),
        b(register_module("b", Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    return Forward(b, Forward(a, x).tanh());
  }
  Linear a, b;
};

// A hook on one tensor with two names sees the sum, too.
TEST(ParameterHooksTest, OfATiedParameterSeeTheSum) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    at::Tensor expected;
    for (int rank = 0; rank < 2; ++rank) {
      auto plain = Filled<TiedNet>();
      FSDP_RETURN_IF_ERROR(Tie(plain->a->weight, plain->b->weight));
      LossOf(plain->forward(RowsOf(rank))).backward();
      const at::Tensor share =
          Clamp(plain->a->weight.grad() + plain->b->weight.grad()) / 2;
      expected = expected.defined() ? expected + share : share;
    }
    auto net = Filled<TiedNet>();
    FSDP_RETURN_IF_ERROR(Tie(net->a->weight, net->b->weight));
    net->b->weight.register_hook(Clamp);
    FSDP_ASSIGN_OR_RETURN(
        auto model, FullyShard(net, Unowned(world), UnitsOf<LinearImpl>()));
    FSDP_RETURN_IF_ERROR(
        model->Backward(LossOf(model->forward(RowsOf(world.rank())))));
    for (const TensorRange& named : model->Ranges()) {
      if (named.name != "a.weight") continue;
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
void ExpectRefused(Way way, const std::function<void(HookedNet&)>& before,
                   const std::function<void(ShardedModuleBase&)>& after,
                   const std::string& text) {
  EXPECT_THAT(RunAllRanks(2,
                          [&](Communicator& world) -> absl::Status {
                            auto net = MakeNet(way);
                            before(*net);
                            FSDP_ASSIGN_OR_RETURN(
                                auto model, FullyShard(net, Unowned(world),
                                                       UnitsOf<UnitImpl>()));
                            after(*model);
                            return TorchToStatus("step", [&] {
                              ThrowIfError(model->Backward(LossOf(
                                  model->forward(RowsOf(world.rank())))));
                            });
                          }),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(text)));
}

TEST(ParameterHooksTest, ThatCannotSeeAWholeGradientAreRefused) {
  const auto nothing = [](const auto&) {};
  ExpectRefused(Way::kUsedTwice, Register, nothing,
                "the hook on parameter unit.linear.weight");
  ExpectRefused(
      Way::kForward, nothing,
      [](ShardedModuleBase& model) {
        model.Ranges().back().values.register_hook(AddTo);
      },
      "a hook on the shard of");
  ExpectRefused(
      Way::kForward,
      [](HookedNet& net) {
        torch::autograd::impl::set_post_acc_grad_hooks(
            net.head->weight, std::make_unique<CountCalls>());
      },
      nothing, "a post-accumulate-grad hook on parameter head.weight");
}

}  // namespace
}  // namespace fsdp::testing
