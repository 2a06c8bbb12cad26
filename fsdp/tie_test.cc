#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <torch/optim/sgd.h>

#include "fsdp/model/forward.h"
#include "fsdp/testing/gradient_check.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

// An embedding and a head in units of their own.
class TiedNet : public torch::nn::Module {
 public:
  TiedNet()
      : embed(register_module("embed", std::make_shared<UnitImpl>())),
        head(register_module("head", std::make_shared<UnitImpl>())) {
    fsdp::testing::FillParameters(*this, 1);
    ThrowIfError(Tie(embed->linear->weight, head->linear->weight));
  }
  at::Tensor forward(const at::Tensor& x) {
    return Forward(head, Forward(embed, x).tanh());
  }
  std::shared_ptr<UnitImpl> embed, head;
};

TEST(TieTest, TiedParametersOfTwoUnitsTrainAsOne) {
  const TiedNet initial;
  at::Tensor weight = initial.embed->linear->weight.detach().clone();
  at::Tensor first = initial.embed->linear->bias.detach().clone();
  at::Tensor second = initial.head->linear->bias.detach().clone();
  for (at::Tensor* each : {&weight, &first, &second}) {
    each->set_requires_grad(true);
  }
  torch::optim::SGD optimizer({weight, first, second}, 0.1);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const at::Tensor x = Rows(step, 4, kDim);
    at::linear(at::linear(x, weight, first).tanh(), weight, second)
        .square()
        .mean()
        .backward();
    optimizer.step();
  }
  for (const int world_size : {1, 2, 3}) {
    EXPECT_OK(RunAllRanks(world_size, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(
          auto model, FullyShard(std::make_shared<TiedNet>(), Unowned(world),
                                 UnitsOf<UnitImpl>()));
      FSDP_RETURN_IF_ERROR(CheckThat(model->Parameters().size(), Eq(3U),
                                     "count of parameters, two of them tied"));
      torch::optim::SGD sharded(model->Parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        sharded.zero_grad();
        FSDP_RETURN_IF_ERROR(model->Backward(
            model->forward(Rows(step, 4, kDim)).square().mean()));
        sharded.step();
      }
      return model->ForEachFullParameter(
          [&](const std::string& name, const at::Tensor& value) {
            const at::Tensor& expected = name == "embed.linear.weight" ? weight
                                         : name == "embed.linear.bias" ? first
                                                                       : second;
            return at::allclose(value, expected, 1e-4, 1e-6)
                       ? absl::OkStatus()
                       : absl::InternalError(name);
          });
    }));
  }
}

// Two tensors over one memory, of which one is trained.
absl::Status TrainWithOneFrozen(Communicator& world, bool freezes_first) {
  const auto make = [freezes_first] {
    auto net = std::make_shared<TiedNet>();
    (freezes_first ? net->embed : net->head)
        ->linear->weight.set_requires_grad(false);
    return net;
  };
  auto plain = make();
  torch::optim::SGD plain_optimizer(plain->parameters(), 0.1);
  FSDP_ASSIGN_OR_RETURN(
      auto model, FullyShard(make(), Unowned(world), UnitsOf<UnitImpl>()));
  torch::optim::SGD optimizer(model->Parameters(), 0.1);
  for (int step = 0; step < 2; ++step) {
    plain_optimizer.zero_grad();
    for (int rank = 0; rank < world.world_size(); ++rank) {
      (plain->forward(Rows(4 * rank + step, 4, kDim)).square().mean() /
       world.world_size())
          .backward();
    }
    plain_optimizer.step();
    optimizer.zero_grad();
    FSDP_RETURN_IF_ERROR(
        model->Backward(model->forward(Rows(4 * world.rank() + step, 4, kDim))
                            .square()
                            .mean()));
    optimizer.step();
  }
  const auto expected = plain->named_parameters();
  return model->ForEachFullParameter(
      [&expected](const std::string& name, const at::Tensor& value) {
        return at::allclose(value, expected[name], 1e-4, 1e-6)
                   ? absl::OkStatus()
                   : absl::InternalError(name);
      });
}

TEST(TieTest, OfTwoTensorsTheTrainableOneAloneGivesGradients) {
  for (const bool freezes_first : {true, false}) {
    for (const int world_size : {1, 2}) {
      EXPECT_OK(RunAllRanks(world_size, [&](Communicator& world) {
        return TrainWithOneFrozen(world, freezes_first);
      })) << freezes_first;
    }
  }
}

TEST(TieTest, RefusesWhatDiffersOrIsInUse) {
  const torch::nn::Linear a(2, 3);
  const torch::nn::Linear b(3, 2);
  const torch::nn::Linear c(2, 3);
  EXPECT_THAT(Tie(a->weight, b->weight),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("Float [3, 2] on cpu and Float [2, 3]")));
  EXPECT_THAT(
      Tie(a->weight, at::Tensor()),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("undefined")));
  c->weight.mutable_grad() = at::ones({3, 2});
  EXPECT_THAT(Tie(a->weight, c->weight),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("before training")));
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    torch::nn::Linear sharded(2, 3);
    FSDP_RETURN_IF_ERROR(FullyShard(sharded, Unowned(world)).status());
    const torch::nn::Linear other(2, 3);
    const absl::Status refused = Tie(sharded->weight, other->weight);
    return absl::IsFailedPrecondition(refused)
               ? absl::OkStatus()
               : absl::InternalError(refused.ToString());
  }));
}

}  // namespace
}  // namespace fsdp::testing
