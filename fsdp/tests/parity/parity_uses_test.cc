// Behaviours of docs/parity.md about the uses of a unit: when it is gathered,
// when gradients are reduced, when a forward ends. Ranks have different data,
// and plain modules give the expected values.
#include <torch/csrc/autograd/function.h>
#include <torch/optim/sgd.h>

#include <set>

#include "base/autograd_node.h"
#include "fsdp/recompute/checkpoint.h"
#include "fsdp/state/whole_model.h"
#include "fsdp/testing/gradient_check.h"

namespace fsdp::testing {
namespace {

at::Tensor DataOf(int rank, int step) {
  return InputOf(rank, Rows(int64_t{4} * step, 3, kDim));
}

class LooksAtItself : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    values.push_back(linear->weight.detach().clone());
    nodes.push_back(linear->weight.grad_fn());
    return linear->forward(x);
  }
  Linear linear = register_module("linear", Linear(kDim, kDim));
  std::vector<at::Tensor> values;
  // Keeps nodes, so that no two have the same address.
  std::vector<NodePtr> nodes;
};

class AroundOne : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    return head->forward(Forward(unit, x).tanh());
  }
  std::shared_ptr<LooksAtItself> unit =
      register_module("unit", std::make_shared<LooksAtItself>());
  Linear head = register_module("head", Linear(kDim, kDim));
};

TEST(UnitUseTest, IsGatheredWithANodeOfItsOwnBeforeItsModuleRuns) {
  constexpr int kSteps = 3;
  EXPECT_OK(RunAllRanks(3, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(Filled<AroundOne>(), Unowned(world),
                                     UnitsOf<LooksAtItself>()));
    const auto plain = Filled<AroundOne>();
    torch::optim::SGD optimizer(model->Parameters(), 0.5);
    torch::optim::SGD plain_optimizer(plain->parameters(), 0.5);
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor expected = plain->unit->linear->weight.detach().clone();
      optimizer.zero_grad();
      plain_optimizer.zero_grad();
      FSDP_RETURN_IF_ERROR(model->Backward(
          model->forward(DataOf(world.rank(), step)).square().mean()));
      for (int rank = 0; rank < world.world_size(); ++rank) {
        (plain->forward(DataOf(rank, step)).square().mean() /
         world.world_size())
            .backward();
      }
      optimizer.step();
      plain_optimizer.step();
      EXPECT_TRUE(at::allclose(model.module()->unit->values.back(), expected,
                               1e-4, 1e-6))
          << "values of step " << step;
    }
    const auto& nodes = model.module()->unit->nodes;
    const std::set<NodePtr> distinct(nodes.begin(), nodes.end());
    EXPECT_TRUE(distinct.count(nullptr) == 0) << "a parameter without a node";
    EXPECT_TRUE(distinct.size() == kSteps) << "a node of an earlier forward";
    return Check(
        distinct.count(model.module()->unit->linear->weight.grad_fn()) == 0,
        "that of between steps");
  }));
}

// Uses its parameters twice.
class TwiceInside : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    return linear->forward(linear->forward(x).tanh());
  }
  Linear linear = register_module("linear", Linear(kDim, kDim));
};

// Uses a unit as `body` says.
class UsesAUnit : public torch::nn::Module {
 public:
  using Use = std::function<at::Tensor(const at::Tensor&)>;
  using Body = at::Tensor (*)(const Use& once, const at::Tensor& x);

  explicit UsesAUnit(Body body)
      : unit(register_module("unit", std::make_shared<TwiceInside>())),
        head(register_module("head", Linear(kDim, kDim))),
        body_(body) {
    FillParameters(*this, 1);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto once = [this](const at::Tensor& y) { return Forward(unit, y); };
    return body_(once, head->forward(x));
  }
  std::shared_ptr<TwiceInside> unit;
  Linear head;

 private:
  const Body body_;
};

using Use = UsesAUnit::Use;

at::Tensor Once(const Use& once, const at::Tensor& x) { return once(x); }
at::Tensor Chain(const Use& once, const at::Tensor& x) {
  return once(once(x).tanh());
}

// A reduction that is too early is a part of a sum plus another reduction; two
// are a sum that is too large.
TEST(UnitUseTest, IsReducedOnceWhenAllOfItsGradientsAreThere) {
  const std::pair<UsesAUnit::Body, int> reductions[] = {
      {Once, 1},
      {Chain, 2},
      {[](const Use& once, const at::Tensor& x) {
         return once(x) * once(x * 2);
       },
       2},
      {[](const Use& once, const at::Tensor& x) { return Checkpoint(once, x); },
       1},
      {[](const Use& once, const at::Tensor& x) {
         return Checkpoint(
             [once](const at::Tensor& y) { return Chain(once, y); }, x);
       },
       2}};
  for (const auto& [body, expected] : reductions) {
    RecordedRanks ranks(2);
    EXPECT_OK(AllOk(RunRanks(ranks.group, [&, &body = body](auto& world) {
      return CheckGradients<UsesAUnit>(
          world, UnitsOf<TwiceInside>(),
          [&] { return std::make_shared<UsesAUnit>(body); }, SquareLoss);
    })));
    for (const CollectiveLog& log : ranks.logs) {
      const auto count = [&](auto... unit) {
        return log.TotalsOf(Collective::kReduceScatter, unit...).count;
      };
      EXPECT_EQ(count("unit"), expected);
      EXPECT_EQ(count(), expected + 1);
    }
  }
}

TEST(UnitUseTest, OfTwoForwardsIsReducedByTheBackwardOfEach) {
  RecordedRanks ranks(2);
  EXPECT_OK(
      AllOk(RunRanks(ranks.group, [&](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(
            auto model, FullyShard(std::make_shared<UsesAUnit>(Once),
                                   Unowned(world), UnitsOf<TwiceInside>()));
        UsesAUnit plain(Once);
        std::vector<at::Tensor> losses;
        for (const int step : {0, 1}) {
          losses.push_back(
              model->forward(DataOf(world.rank(), step)).square().mean());
        }
        for (const int step : {0, 1}) {
          FSDP_RETURN_IF_ERROR(model->Backward(losses[step]));
          for (int rank = 0; rank < world.world_size(); ++rank) {
            plain.forward(DataOf(rank, step)).square().mean().backward();
          }
          FSDP_RETURN_IF_ERROR(CheckMeans(*model, plain, world.world_size()));
          EXPECT_EQ(ranks.logs[world.rank()]
                        .TotalsOf(Collective::kReduceScatter, "unit")
                        .count,
                    step + 1)
              << "reductions after backward " << step;
        }
        return absl::OkStatus();
      })));
}

// The library looks for its tensors after the module has run.
struct Found {
  at::Tensor y;
  torch::nn::Module* module = nullptr;
  absl::Status* refused = nullptr;
};

template <typename Visit>
void VisitTensors(Found& output, Visit visit) {
  if (output.module != nullptr) {
    *output.refused = SummonFullParams(*output.module).status();
  }
  visit(output.y);
}

class ReturnsFound : public torch::nn::Module {
 public:
  Found forward(const at::Tensor& x) {
    return {linear->forward(x).tanh(), this, &refused};
  }
  Linear linear = register_module("linear", Linear(kDim, kDim));
  absl::Status refused;
};

TEST(EndOfForwardTest, ComesAfterItsOutputsAreKnown) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(Filled<ReturnsFound>(), Unowned(world)));
    const auto plain = Filled<ReturnsFound>();
    const Found found = model->forward(DataOf(world.rank(), 0));
    const absl::Status& refused = model.module()->refused;
    EXPECT_TRUE(absl::IsFailedPrecondition(refused) &&
                absl::StrContains(refused.message(), "inside a forward"))
        << refused.ToString();
    // The forward has ended, and backward enters by its output's exits.
    FSDP_RETURN_IF_ERROR(SummonFullParams(*model.module()).status());
    FSDP_RETURN_IF_ERROR(model->Backward(found.y.square().mean()));
    for (int rank = 0; rank < world.world_size(); ++rank) {
      plain->linear->forward(DataOf(rank, 0)).tanh().square().mean().backward();
    }
    return CheckMeans(*model, *plain, world.world_size());
  }));
}

}  // namespace
}  // namespace fsdp::testing
